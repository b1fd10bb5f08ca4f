//! What a peer sends under a tag, received into registered memory.
//!
//! UCX hands over each piece of it, and it is copied here: once the one that waits for it does so no more, nothing of it is
//! written, whatever still arrives.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};

use super::Status;
use super::batch::Tally;
use super::bindings::types as ucx;
use super::library::Library;

/// One message that is waited for. UCX holds one of it, too, until it has come or is waited for no more.
#[derive(Debug)]
pub(super) struct Catch {
    tally: Arc<Tally>,
    pub(super) tag: u64,
    address: *mut u8,
    bytes: usize,
    /// UCX's, while it can be cancelled.
    request: AtomicPtr<c_void>,
    /// It has come, or failed, and UCX has let go of it.
    over: AtomicBool,
    /// Whether anybody waits for it.
    wanted: AtomicBool,
}

// SAFETY: the address is of registered memory, which is no thread's own. All else is shared by its types.
unsafe impl Send for Catch {}
// SAFETY: as for `Send`; the memory is written by whoever holds the worker's lock.
unsafe impl Sync for Catch {}

impl Catch {
    /// Of that many bytes, into memory that the tally's batch holds.
    pub(super) fn new(tally: &Arc<Tally>, tag: u64, address: *mut c_void, bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            tally: Arc::clone(tally),
            tag,
            address: address.cast(),
            bytes,
            request: AtomicPtr::new(ptr::null_mut()),
            over: AtomicBool::new(false),
            wanted: AtomicBool::new(true),
        })
    }

    /// Waits for it. It is counted in its batch.
    pub(super) fn post(self: &Arc<Self>, library: &Library, worker: ucx::ucp_worker_h, shape: ucx::ucp_datatype_t) {
        let held = Arc::into_raw(Arc::clone(self)).cast_mut().cast();
        let mut params = ucx::ucp_request_param_t {
            op_attr_mask: ucx::UCP_OP_ATTR_FIELD_CALLBACK
                | ucx::UCP_OP_ATTR_FIELD_USER_DATA
                | ucx::UCP_OP_ATTR_FIELD_DATATYPE
                | ucx::UCP_OP_ATTR_FIELD_MEMORY_TYPE
                // The callback says how much came.
                | ucx::UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
            datatype: shape,
            memory_type: ucx::UCS_MEMORY_TYPE_HOST,
            user_data: held,
            ..ucx::ucp_request_param_t::default()
        };
        params.cb.recv = Some(caught);
        self.tally.begins();
        // SAFETY: the worker is there; the buffer is what the shape takes it for, and is held until the callback.
        let begun =
            unsafe { library.ucp.ucp_tag_recv_nbx(worker, held, 1, self.tag, u64::MAX, &raw const params) };
        match super::Begun::of(begun) {
            super::Begun::Over(result) => {
                // SAFETY: it was given above, and no callback comes.
                drop(unsafe { Arc::from_raw(held.cast_const().cast::<Self>()) });
                self.over.store(true, Relaxed);
                // Nothing is over at once but what failed.
                self.tally.is_over(result.and(Err(Status(ucx::UCS_ERR_NO_RESOURCE))));
            }
            super::Begun::Pending => {
                // A callback that came within the call has let go of it.
                if !self.over.load(Relaxed) {
                    self.request.store(begun, Relaxed);
                }
            }
        }
    }

    /// Waits no more, if it does. What UCX has begun to receive goes on, and is written nowhere.
    pub(super) fn abandon(&self, library: &Library, worker: ucx::ucp_worker_h) {
        if self.over.load(Relaxed) || !self.wanted.swap(false, Relaxed) {
            return;
        }
        self.tally.abandons();
        let request = self.request.swap(ptr::null_mut(), Relaxed);
        if !request.is_null() {
            // SAFETY: UCX has it: the callback, which may come within this call, would have taken it away.
            unsafe { library.ucp.ucp_request_cancel(worker, request) };
        }
    }

    fn is_whole(&self, length: usize) -> Result<(), Status> {
        if length == self.bytes { Ok(()) } else { Err(Status(ucx::UCS_ERR_MESSAGE_TRUNCATED)) }
    }

    /// The callback's own: it has come, or not.
    fn ended(&self, result: Result<(), Status>) {
        self.request.store(ptr::null_mut(), Relaxed);
        self.over.store(true, Relaxed);
        if self.wanted.load(Relaxed) {
            self.tally.ends(result);
        } else {
            self.tally.ends_abandoned();
        }
    }
}

// SAFETY: to be called by UCX only, once per receive that was posted with it and did not fail within the call, with that receive's
// request and catch.
unsafe extern "C" fn caught(
    request: *mut c_void,
    status: ucx::ucs_status_t,
    info: *const ucx::ucp_tag_recv_info_t,
    held: *mut c_void,
) {
    // SAFETY: it was given away when the receive was posted, and comes back once.
    let catch = unsafe { Arc::from_raw(held.cast_const().cast::<Catch>()) };
    // SAFETY: not null, and given by UCX for this call.
    let length = if info.is_null() { 0 } else { unsafe { (*info).length } };
    let result = Status::check(status).and_then(|()| catch.is_whole(length));
    // SAFETY: the request is this callback's, and is not used after it.
    unsafe { catch.tally.library.ucp.ucp_request_free(request) };
    catch.ended(result);
}

/// How UCX is to hand over what it receives.
#[derive(Debug)]
pub(super) struct Shape {
    library: &'static Library,
    pub(super) datatype: ucx::ucp_datatype_t,
}

impl Shape {
    pub(super) fn new(library: &'static Library) -> Result<Self, Status> {
        let operations = ucx::ucp_generic_dt_ops_t {
            start_pack: Some(start_pack),
            start_unpack: Some(start_unpack),
            packed_size: Some(packed_size),
            pack: Some(pack),
            unpack: Some(unpack),
            finish: Some(finish),
        };
        let mut datatype = 0;
        // SAFETY: the functions are copied, and live as long as the process.
        let status = unsafe {
            library.ucp.ucp_dt_create_generic(&raw const operations, ptr::null_mut(), &raw mut datatype)
        };
        Status::check(status)?;
        Ok(Self { library, datatype })
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: it was made above; the worker whose receives used it is gone.
        unsafe { self.library.ucp.ucp_dt_destroy(self.datatype) };
    }
}

// SAFETY: nothing is ever packed.
unsafe extern "C" fn start_pack(_: *mut c_void, _: *const c_void, _: usize) -> *mut c_void {
    ptr::null_mut()
}

// SAFETY: to be called by UCX only, with what a receive was posted with.
unsafe extern "C" fn start_unpack(_: *mut c_void, catch: *mut c_void, _: usize) -> *mut c_void {
    catch
}

// SAFETY: to be called by UCX only, with what `start_unpack` gave, before the callback of that receive.
unsafe extern "C" fn packed_size(catch: *mut c_void) -> usize {
    if catch.is_null() {
        return 0;
    }
    // SAFETY: UCX holds one of it until its callback.
    unsafe { (*catch.cast_const().cast::<Catch>()).bytes }
}

// SAFETY: nothing is ever packed.
unsafe extern "C" fn pack(_: *mut c_void, _: usize, _: *mut c_void, _: usize) -> usize {
    0
}

// SAFETY: to be called by UCX only, with what `start_unpack` gave, before the callback of that receive, with that many bytes, while
// the worker's lock is held.
unsafe extern "C" fn unpack(
    catch: *mut c_void,
    offset: usize,
    bytes: *const c_void,
    length: usize,
) -> ucx::ucs_status_t {
    if catch.is_null() {
        return ucx::UCS_ERR_MESSAGE_TRUNCATED;
    }
    // SAFETY: UCX holds one of it until its callback.
    let catch = unsafe { &*catch.cast_const().cast::<Catch>() };
    if offset.checked_add(length).is_none_or(|end| end > catch.bytes) {
        return ucx::UCS_ERR_MESSAGE_TRUNCATED;
    }
    if length > 0 && catch.wanted.load(Relaxed) {
        // SAFETY: the offset is within the range, as was checked.
        let place = unsafe { catch.address.add(offset) };
        // SAFETY: there are that many bytes to be read, as UCX says, and to be written, as was checked: the batch that wants it
        // holds the memory.
        unsafe { ptr::copy_nonoverlapping(bytes.cast::<u8>(), place, length) };
    }
    ucx::UCS_OK
}

// SAFETY: it does nothing.
unsafe extern "C" fn finish(_: *mut c_void) {}
