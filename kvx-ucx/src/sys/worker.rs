//! A worker: what makes progress, and where messages arrive.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use super::bindings::types as ucx;
use super::catch::Shape;
use super::context::{Context, Failure, fail};
use super::inbox::{Fact, HEADER, Inbox, MOST_PAYLOAD};
use super::log::{self, Heard};
use super::{Begun, Status};

/// The number of kvx's messages.
pub(super) const MESSAGE: u32 = 0x4b;

/// A worker. Everything that is made of it must be gone before it.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(super) context: Arc<Context>,
    pub(super) handle: ucx::ucp_worker_h,
    pub(super) inbox: Arc<Inbox>,
    descriptor: RawFd,
    /// Warnings that came when it was made.
    pub(crate) said: Heard,
    /// Of what is received under tags. Dropped after the worker is destroyed.
    pub(super) shape: Shape,
}

// SAFETY: it is made for threads that use it one at a time, and is bound to none.
unsafe impl Send for Worker {}

impl Worker {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        let ucp = &context.library.ucp;
        let params = ucx::ucp_worker_params {
            field_mask: u64::from(ucx::UCP_WORKER_PARAM_FIELD_THREAD_MODE),
            thread_mode: ucx::UCS_THREAD_MODE_SERIALIZED,
            ..ucx::ucp_worker_params::default()
        };
        let failed = |status| Failure { call: "ucp_dt_create_generic", status, said: Vec::new() };
        let shape = Shape::new(context.library).map_err(failed)?;
        let mut handle = ptr::null_mut();
        let (status, said) = log::listen(context.library, || {
            // SAFETY: the context is there, and the parameters say which of their fields are set.
            unsafe { ucp.ucp_worker_create(context.handle, &raw const params, &raw mut handle) }
        });
        if status < 0 {
            return Err(Failure { call: "ucp_worker_create", status: Status(status), said: said.into_lines() });
        }
        let mut worker = Self {
            context: Arc::clone(context),
            handle,
            inbox: Arc::default(),
            descriptor: -1,
            said,
            shape,
        };
        // SAFETY: the worker is there, and there is a place for the descriptor.
        let status = unsafe { ucp.ucp_worker_get_efd(handle, &raw mut worker.descriptor) };
        fail("ucp_worker_get_efd", status, Vec::new)?;
        let params = ucx::ucp_am_handler_param {
            field_mask: u64::from(
                ucx::UCP_AM_HANDLER_PARAM_FIELD_ID
                    | ucx::UCP_AM_HANDLER_PARAM_FIELD_CB
                    | ucx::UCP_AM_HANDLER_PARAM_FIELD_ARG,
            ),
            id: MESSAGE,
            cb: Some(arrived),
            arg: Arc::as_ptr(&worker.inbox).cast_mut().cast(),
            ..ucx::ucp_am_handler_param::default()
        };
        // SAFETY: the callback has the right type, and its argument lives as long as the worker.
        let status = unsafe { ucp.ucp_worker_set_am_recv_handler(handle, &raw const params) };
        fail("ucp_worker_set_am_recv_handler", status, Vec::new)?;
        Ok(worker)
    }

    /// Transports and devices that its context may use: `tcp/eth0`.
    pub(crate) fn resources(&self) -> Vec<String> {
        self.context.resources()
    }

    /// What peers need in order to reach it.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Failure> {
        let ucp = &self.context.library.ucp;
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the worker is there, and there are places for the address and its length.
        let status = unsafe { ucp.ucp_worker_get_address(self.handle, &raw mut address, &raw mut length) };
        fail("ucp_worker_get_address", status, Vec::new)?;
        // SAFETY: UCX has put that many bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: it was given above, and is not used after this.
        unsafe { ucp.ucp_worker_release_address(self.handle, address) };
        Ok(bytes)
    }

    /// Becomes readable when there is progress to be made, once it is [armed](Self::arm).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: it is the worker's, and open as long as that is there.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }

    /// Makes some progress. How much; 0 when there is none to be made now.
    pub(crate) fn progress(&mut self) -> u32 {
        // SAFETY: the worker is there, and `&mut` says that nobody else uses it.
        unsafe { self.context.library.ucp.ucp_worker_progress(self.handle) }
    }

    /// Whether it is safe to sleep on the descriptor: otherwise there is progress to be made first.
    pub(crate) fn arm(&mut self) -> bool {
        // SAFETY: as for `progress`.
        let status = unsafe { self.context.library.ucp.ucp_worker_arm(self.handle) };
        status == ucx::UCS_OK
    }

    /// Throws away what came under tags that nobody waits for, nor will.
    pub(crate) fn discard(&mut self, may_be_awaited: impl Fn(u64) -> bool) {
        let ucp = &self.context.library.ucp;
        let mut info = ucx::ucp_tag_recv_info::default();
        loop {
            // SAFETY: the worker is there, `&mut` says that nobody else uses it, and there is a place for the answer.
            let found = unsafe { ucp.ucp_tag_probe_nb(self.handle, 0, 0, 0, &raw mut info) };
            if found.is_null() || may_be_awaited(info.sender_tag) {
                return;
            }
            // SAFETY: as above. It is the one that was found, or an earlier one of the same tag.
            let message = unsafe { ucp.ucp_tag_probe_nb(self.handle, info.sender_tag, u64::MAX, 1, &raw mut info) };
            if message.is_null() {
                return;
            }
            let params = ucx::ucp_request_param_t::default();
            // SAFETY: the message was taken out of the queue, and is used once; there is room for none of it, so none is written.
            let begun =
                unsafe { ucp.ucp_tag_msg_recv_nbx(self.handle, ptr::null_mut(), 0, message, &raw const params) };
            if let Begun::Pending = Begun::of(begun) {
                // SAFETY: it was given above: UCX lets go of it once the rest of the message has come.
                unsafe { ucp.ucp_request_free(begun) };
            }
        }
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: whatever was made of it is gone.
        unsafe { self.context.library.ucp.ucp_worker_destroy(self.handle) };
    }
}

/// A message came. What makes no sense is dropped: whoever sent it is not known.
// SAFETY: to be called by UCX only, with the inbox that it was set with, and a header and data of the lengths that are said.
unsafe extern "C" fn arrived(
    inbox: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucx::ucp_am_recv_param_t,
) -> ucx::ucs_status_t {
    if inbox.is_null() || param.is_null() || header.is_null() || header_length != HEADER {
        return ucx::UCS_OK;
    }
    // SAFETY: not null, and given by UCX for this call.
    let attributes = unsafe { (*param).recv_attr };
    // A message of kvx is short. Of one that is not, the data is not here, and is never asked for.
    if attributes & u64::from(ucx::UCP_AM_RECV_ATTR_FLAG_RNDV) != 0
        || length > MOST_PAYLOAD
        || (length > 0 && data.is_null())
    {
        return ucx::UCS_OK;
    }
    let mut head = [0; HEADER];
    // SAFETY: the header has that many bytes, as was checked.
    unsafe { ptr::copy_nonoverlapping(header.cast::<u8>(), head.as_mut_ptr(), HEADER) };
    let mut payload = vec![0; length];
    if length > 0 {
        // SAFETY: the data is here, and has that many bytes; so has the payload.
        unsafe { ptr::copy_nonoverlapping(data.cast::<u8>(), payload.as_mut_ptr(), length) };
    }
    // SAFETY: it is the worker's own, which lives as long as the worker.
    let inbox = unsafe { &*inbox.cast::<Inbox>() };
    inbox.push(Fact::Message(head, payload));
    ucx::UCS_OK
}
