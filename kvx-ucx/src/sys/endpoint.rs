//! An endpoint: the way to one peer.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::bindings::types as ucx;
use super::context::{Failure, print};
use super::inbox::{Fact, Inbox};
use super::library::Library;
use super::worker::Worker;
use super::{Begun, Status, log};

/// What is read behind a peer's bytes, should their lengths lie: zeros.
const PADDING: usize = 64 << 10;

/// Bytes that a peer gave, for calls of UCX's that are not told their length.
pub(super) fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = vec![0; bytes.len() + PADDING];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

/// The way to one peer. Made and used under the lock of its worker.
#[derive(Debug)]
pub(crate) struct Endpoint {
    library: &'static Library,
    pub(super) handle: ucx::ucp_ep_h,
    /// Operations of this side's transfers that UCX has.
    pub(crate) load: Arc<AtomicU32>,
    /// Those that the peer's transfers ask for.
    pub(crate) service: Arc<AtomicU32>,
    /// What the error handler is given. It outlives the endpoint in UCX.
    origin: Box<Origin>,
    closing: bool,
}

// SAFETY: it belongs to a worker that is not bound to a thread, and is used under the same lock.
unsafe impl Send for Endpoint {}

#[derive(Debug)]
struct Origin {
    library: &'static Library,
    inbox: Arc<Inbox>,
    token: u64,
}

impl Endpoint {
    /// The way to the worker of this address. `token` names it in facts. It connects when it is used.
    pub(crate) fn new(worker: &mut Worker, address: &[u8], token: u64) -> Result<Self, Failure> {
        let library = worker.context.library;
        let address = padded(address);
        let mut origin = Box::new(Origin { library, inbox: Arc::clone(&worker.inbox), token });
        let mut params = ucx::ucp_ep_params {
            field_mask: u64::from(
                ucx::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                    | ucx::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                    | ucx::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            ),
            address: address.as_ptr().cast(),
            err_mode: ucx::UCP_ERR_HANDLING_MODE_PEER,
            ..ucx::ucp_ep_params::default()
        };
        params.err_handler.cb = Some(failed);
        params.err_handler.arg = (&raw mut *origin).cast();
        let mut handle = ptr::null_mut();
        let (status, said) = log::listen(library, || {
            // SAFETY: the worker is there; the address is followed by zeros; the callback's argument outlives the endpoint.
            unsafe { library.ucp.ucp_ep_create(worker.handle, &raw const params, &raw mut handle) }
        });
        if status < 0 {
            return Err(Failure { call: "ucp_ep_create", status: Status(status), said: said.into_lines() });
        }
        said.tell_but(|_| false);
        Ok(Self { library, handle, load: Arc::default(), service: Arc::default(), origin, closing: false })
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// How many operations of this side's transfers UCX has.
    pub(crate) fn load(&self) -> u32 {
        self.load.load(Relaxed)
    }

    /// How many operations UCX has that the peer's transfers ask for.
    pub(crate) fn service(&self) -> u32 {
        self.service.load(Relaxed)
    }

    /// Ends it without asking the peer: what is in flight ends, too. A fact says when it is gone.
    pub(crate) fn close(&mut self) {
        if std::mem::replace(&mut self.closing, true) {
            return;
        }
        let mut params = ucx::ucp_request_param_t {
            op_attr_mask: ucx::UCP_OP_ATTR_FIELD_FLAGS
                | ucx::UCP_OP_ATTR_FIELD_CALLBACK
                | ucx::UCP_OP_ATTR_FIELD_USER_DATA,
            flags: ucx::UCP_EP_CLOSE_FLAG_FORCE,
            user_data: (&raw mut *self.origin).cast(),
            ..ucx::ucp_request_param_t::default()
        };
        params.cb.send = Some(closed);
        // SAFETY: the endpoint is there, and is not used after this; the callback's argument lives until the fact was told.
        let begun = unsafe { self.library.ucp.ucp_ep_close_nbx(self.handle, &raw const params) };
        if let Begun::Over(_) = Begun::of(begun) {
            self.origin.inbox.push(Fact::Closed(self.origin.token));
        }
    }

    /// The ways that it uses, in UCX's words: `3:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] am am_bw#0 wireup`.
    pub(crate) fn lanes(&self) -> Vec<String> {
        if self.closing {
            return Vec::new();
        }
        let text = print(|stream| {
            // SAFETY: the endpoint is there, and the stream is open for writing.
            unsafe { self.library.ucp.ucp_ep_print_info(self.handle, stream) };
        });
        let lanes = text.lines().filter(|line| line.contains(" lane["));
        lanes.filter_map(|line| Some(line.split_once("]:")?.1.trim().to_owned())).collect()
    }
}

// SAFETY: to be called by UCX only, with the origin that the endpoint was made with.
unsafe extern "C" fn failed(origin: *mut c_void, _: ucx::ucp_ep_h, status: ucx::ucs_status_t) {
    // SAFETY: it is what the endpoint was made with, and lives as long as that.
    let origin = unsafe { &*origin.cast::<Origin>() };
    origin.inbox.push(Fact::Failed(origin.token, Status(status)));
}

// SAFETY: to be called by UCX only, once per close that was posted with it, with that close's request and origin.
unsafe extern "C" fn closed(request: *mut c_void, _: ucx::ucs_status_t, origin: *mut c_void) {
    // SAFETY: it is what the endpoint was closed with, and lives until the fact below was told.
    let origin = unsafe { &*origin.cast::<Origin>() };
    // SAFETY: the request is this callback's, and is not used after it.
    unsafe { origin.library.ucp.ucp_request_free(request) };
    origin.inbox.push(Fact::Closed(origin.token));
}
