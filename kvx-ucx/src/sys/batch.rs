//! Operations of one transfer, counted together.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

use kvx_core::transfer::Mode;

use super::bindings::types as ucx;
use super::catch::Catch;
use super::endpoint::Endpoint;
use super::inbox::{Fact, HEADER, Inbox};
use super::key::Key;
use super::library::Library;
use super::memory::Memory;
use super::worker::{MESSAGE, Worker};
use super::{Begun, Status};

/// Operations of one transfer. It holds all that they use until UCX has none of them any more; dropped before, it leaks that.
#[derive(Debug)]
pub(crate) struct Batch {
    tally: Arc<Tally>,
    memory: Vec<Arc<Memory>>,
    keys: Vec<Arc<Key>>,
    /// Messages: their headers, and what follows them.
    letters: Vec<Letter>,
    /// What is to come under tags, in their order.
    catches: Vec<Arc<Catch>>,
}

#[derive(Debug)]
struct Letter {
    /// Where it is when the list of letters grows.
    header: Box<[u8; HEADER]>,
    payload: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Tally {
    pub(super) library: &'static Library,
    inbox: Arc<Inbox>,
    token: u64,
    /// Operations that UCX has.
    pending: AtomicU32,
    /// Of these, those for which nobody waits.
    abandoned: AtomicU32,
    /// The first failure, or 0.
    status: AtomicI32,
    /// Those of all batches that are counted together.
    load: Arc<AtomicU32>,
}

/// A range of one piece on each side. Numbers are places in the lists that the batch was made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) memory: u32,
    pub(crate) key: u32,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) bytes: u64,
}

impl Batch {
    /// No operation yet. `token` names it in facts; `load` counts its operations with those of other batches.
    pub(crate) fn new(
        worker: &Worker,
        load: &Arc<AtomicU32>,
        token: u64,
        memory: Vec<Arc<Memory>>,
        keys: Vec<Arc<Key>>,
    ) -> Self {
        let tally = Tally {
            library: worker.context.library,
            inbox: Arc::clone(&worker.inbox),
            token,
            pending: AtomicU32::new(0),
            abandoned: AtomicU32::new(0),
            status: AtomicI32::new(0),
            load: Arc::clone(load),
        };
        Self { tally: Arc::new(tally), memory, keys, letters: Vec::new(), catches: Vec::new() }
    }

    /// Whether UCX has operations of it that are waited for.
    pub(crate) fn is_pending(&self) -> bool {
        self.tally.pending.load(Relaxed) > self.tally.abandoned.load(Relaxed)
    }

    /// The first failure.
    pub(crate) fn failure(&self) -> Option<Status> {
        match i8::try_from(self.tally.status.load(Relaxed)) {
            Ok(0) => None,
            Ok(status) => Some(Status(status)),
            Err(_) => Some(Status(ucx::UCS_ERR_IO_ERROR)),
        }
    }

    /// Lets go of the memory and keys, which no operation uses any more.
    pub(crate) fn release(&mut self) {
        if !self.is_pending() {
            self.memory.clear();
            self.keys.clear();
            self.letters.clear();
            self.catches.clear();
        }
    }

    /// Whether all of it is the host's memory, on both sides.
    pub(crate) fn is_of_host(&self) -> bool {
        self.memory.iter().all(|memory| memory.is_of_host()) && self.keys.iter().all(|key| key.is_of_host())
    }

    /// The peer's memory domains by which all of its memory here can be reached, a bit each.
    pub(crate) fn domains(&self) -> u64 {
        self.keys.iter().fold(u64::MAX, |all, key| all & key.domains())
    }

    /// The number by which the peer knows the region of a key.
    pub(crate) fn region(&self, key: u32) -> Option<(u32, u32)> {
        self.keys.get(key as usize).map(|key| key.region)
    }

    fn params(&self) -> ucx::ucp_request_param_t {
        let mut params = ucx::ucp_request_param_t {
            op_attr_mask: ucx::UCP_OP_ATTR_FIELD_CALLBACK | ucx::UCP_OP_ATTR_FIELD_USER_DATA,
            user_data: Arc::as_ptr(&self.tally).cast_mut().cast(),
            ..ucx::ucp_request_param_t::default()
        };
        params.cb.send = Some(done);
        params
    }

    /// Calls what begins an operation, and counts it.
    fn begin(&self, call: impl FnOnce(&Library) -> *mut c_void) {
        let tally = &*self.tally;
        tally.begins();
        if let Begun::Over(result) = Begun::of(call(tally.library)) {
            tally.is_over(result);
        }
    }

    /// Moves one part, in either direction.
    pub(crate) fn transfer(&mut self, endpoint: &Endpoint, mode: Mode, part: &Part) {
        let place = || {
            let memory = self.memory.get(part.memory as usize)?;
            let key = self.keys.get(part.key as usize)?;
            let local = memory.place(part.local, part.bytes)?;
            let remote = key.place(part.remote, part.bytes)?;
            Some((memory.kind, local, remote, usize::try_from(part.bytes).ok()?))
        };
        let Some((kind, local, remote, bytes)) = place() else {
            self.tally.fail(Status::OUT_OF_RANGE);
            return;
        };
        let mut params = self.params();
        params.op_attr_mask |= ucx::UCP_OP_ATTR_FIELD_MEMH | ucx::UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        params.memh = local.handle;
        params.memory_type = kind;
        self.begin(|library| match mode {
            // SAFETY: the local range lies in registered memory and the remote one in the key's region; both are held until
            // the callback, and longer if it never comes.
            Mode::Read => unsafe {
                library.ucp.ucp_get_nbx(
                    endpoint.handle,
                    local.address,
                    bytes,
                    remote.address,
                    remote.handle,
                    &raw const params,
                )
            },
            // SAFETY: as for reading.
            Mode::Write => unsafe {
                library.ucp.ucp_put_nbx(
                    endpoint.handle,
                    local.address,
                    bytes,
                    remote.address,
                    remote.handle,
                    &raw const params,
                )
            },
        });
    }

    /// Is over when all that was posted to the endpoint before is where it belongs.
    pub(crate) fn flush(&mut self, endpoint: &Endpoint) {
        let params = self.params();
        // SAFETY: the endpoint is there; what the callback is given lives until it comes.
        self.begin(|library| unsafe { library.ucp.ucp_ep_flush_nbx(endpoint.handle, &raw const params) });
    }

    /// Sends a range of memory under a tag. It must not leave its piece.
    pub(crate) fn dispatch(&mut self, endpoint: &Endpoint, tag: u64, memory: u32, offset: u64, bytes: u64) {
        let place = || {
            let memory = self.memory.get(memory as usize)?;
            Some((memory.kind, memory.place(offset, bytes)?, usize::try_from(bytes).ok()?))
        };
        let Some((kind, place, bytes)) = place() else {
            self.tally.fail(Status::OUT_OF_RANGE);
            return;
        };
        let mut params = self.params();
        params.op_attr_mask |= ucx::UCP_OP_ATTR_FIELD_MEMH | ucx::UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        params.memh = place.handle;
        params.memory_type = kind;
        // SAFETY: the range lies in registered memory, which is held until the callback, and longer if it never comes.
        self.begin(|library| unsafe {
            library.ucp.ucp_tag_send_nbx(endpoint.handle, place.address, bytes, tag, &raw const params)
        });
    }

    /// Waits for what comes under a tag, which must be so many bytes, for a range of the host's memory. It must not leave its piece.
    pub(crate) fn catch(&mut self, worker: &Worker, tag: u64, memory: u32, offset: u64, bytes: u64) {
        let place = || {
            let memory = self.memory.get(memory as usize)?;
            let place = memory.place(offset, bytes)?;
            (memory.kind == ucx::UCS_MEMORY_TYPE_HOST).then_some((place, usize::try_from(bytes).ok()?))
        };
        let Some((place, bytes)) = place() else {
            self.tally.fail(Status::OUT_OF_RANGE);
            return;
        };
        let catch = Catch::new(&self.tally, tag, place.address, bytes);
        catch.post(self.tally.library, worker.handle, worker.shape.datatype);
        self.catches.push(catch);
    }

    /// Whether what comes under a tag is of it.
    pub(crate) fn awaits(&self, tag: u64) -> bool {
        self.catches.iter().any(|catch| catch.tag == tag)
    }

    /// Waits no more for what was to come under these tags. Nothing of it is written any more.
    pub(crate) fn abandon(&mut self, worker: &Worker, tags: std::ops::Range<u64>) {
        for catch in self.catches.iter().filter(|catch| tags.contains(&catch.tag)) {
            catch.abandon(self.tally.library, worker.handle);
        }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, endpoint: &Endpoint, header: [u8; HEADER], payload: Vec<u8>) {
        let letter = Letter { header: Box::new(header), payload };
        let (header, payload) = (letter.header.as_ptr(), letter.payload.as_ptr());
        let bytes = letter.payload.len();
        self.letters.push(letter);
        let mut params = self.params();
        params.op_attr_mask |= ucx::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = ucx::UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: header and payload have that many bytes, and are held until the callback, and longer if it never comes.
        self.begin(|library| unsafe {
            library.ucp.ucp_am_send_nbx(
                endpoint.handle,
                MESSAGE,
                header.cast(),
                HEADER,
                payload.cast(),
                bytes,
                &raw const params,
            )
        });
    }
}

impl Tally {
    fn fail(&self, status: Status) {
        // The first is kept.
        let _ = self.status.compare_exchange(0, i32::from(status.0), Relaxed, Relaxed);
    }

    /// An operation is about to begin: a callback may come within the call.
    pub(super) fn begins(&self) {
        self.pending.fetch_add(1, Relaxed);
        self.load.fetch_add(1, Relaxed);
    }

    /// One was over within the call that began it.
    pub(super) fn is_over(&self, result: Result<(), Status>) {
        self.load.fetch_sub(1, Relaxed);
        self.pending.fetch_sub(1, Relaxed);
        if let Err(status) = result {
            self.fail(status);
        }
    }

    /// One has ended, as a callback says.
    pub(super) fn ends(&self, result: Result<(), Status>) {
        if let Err(status) = result {
            self.fail(status);
        }
        self.load.fetch_sub(1, Relaxed);
        let left = self.pending.fetch_sub(1, Relaxed) - 1;
        if left == self.abandoned.load(Relaxed) {
            self.inbox.push(Fact::Over(self.token));
        }
    }

    /// Nobody waits for one of them any more.
    pub(super) fn abandons(&self) {
        self.abandoned.fetch_add(1, Relaxed);
        self.load.fetch_sub(1, Relaxed);
    }

    /// One for which nobody waited has ended.
    pub(super) fn ends_abandoned(&self) {
        self.abandoned.fetch_sub(1, Relaxed);
        self.pending.fetch_sub(1, Relaxed);
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.is_pending() {
            std::mem::forget(Arc::clone(&self.tally));
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.keys));
            std::mem::forget(std::mem::take(&mut self.letters));
        }
    }
}

// SAFETY: to be called by UCX only, once per operation that was posted with it, with that operation's request and tally.
unsafe extern "C" fn done(request: *mut c_void, status: ucx::ucs_status_t, tally: *mut c_void) {
    // SAFETY: it is what the operation was posted with: its batch keeps it, or leaks it.
    let tally = unsafe { &*tally.cast::<Tally>() };
    // SAFETY: the request is this callback's, and is not used after it.
    unsafe { tally.library.ucp.ucp_request_free(request) };
    tally.ends(Status::check(status));
}
