//! Registered memory, in as many pieces as a device asks for.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use kvx_core::memory::{MemoryKind, Region};

use super::bindings::types as ucx;
use super::context::Context;
use super::Status;

/// UCX's name for a kind of memory. Never *unknown*: that is another number in each version.
pub(super) fn memory_type(kind: MemoryKind) -> Option<ucx::ucs_memory_type_t> {
    match kind {
        MemoryKind::Host => Some(ucx::UCS_MEMORY_TYPE_HOST),
        MemoryKind::Cuda(_) => Some(ucx::UCS_MEMORY_TYPE_CUDA),
        _ => None,
    }
}

/// A region, registered. It stays so until the last transfer that uses it has let go of this.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<Context>,
    region: Region,
    pub(super) kind: ucx::ucs_memory_type_t,
    /// Bytes of each piece but the last.
    stride: u64,
    pieces: Vec<Handle>,
}

#[derive(Debug)]
struct Handle(ucx::ucp_mem_h);

// SAFETY: UCX's registrations belong to a context, which threads may share, and are not bound to one.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`; they do not change.
unsafe impl Sync for Handle {}

/// What peers need of a region: where it is, and UCX's keys to its pieces.
pub(crate) struct Packed {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes of each piece but the last.
    pub(crate) stride: u64,
    /// Of each piece; one, where all are the same.
    pub(crate) keys: Vec<Vec<u8>>,
}

/// Where a range lies.
pub(super) struct Place {
    pub(super) address: *mut c_void,
    pub(super) handle: ucx::ucp_mem_h,
}

impl Memory {
    /// Registers a region, in pieces of at most `stride` bytes.
    pub(crate) fn map(context: &Arc<Context>, region: &Region, stride: u64) -> Result<Self, Status> {
        let kind = memory_type(region.kind()).ok_or(Status(ucx::UCS_ERR_UNSUPPORTED))?;
        let (mut memory, stride) = (
            Self { context: Arc::clone(context), region: region.clone(), kind, stride, pieces: Vec::new() },
            stride.max(1),
        );
        memory.stride = stride;
        let mut offset = 0;
        while offset < region.bytes() {
            let bytes = stride.min(region.bytes() - offset);
            let length = usize::try_from(bytes).map_err(|_| Status(ucx::UCS_ERR_EXCEEDS_LIMIT))?;
            let params = ucx::ucp_mem_map_params {
                field_mask: u64::from(
                    ucx::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                        | ucx::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                        | ucx::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
                ),
                address: memory.address(offset),
                length,
                memory_type: kind,
                ..ucx::ucp_mem_map_params::default()
            };
            let mut handle = ptr::null_mut();
            // SAFETY: the range is memory of this kind, which the region keeps for as long as the registration lasts.
            let status =
                unsafe { context.library.ucp.ucp_mem_map(context.handle, &raw const params, &raw mut handle) };
            Status::check(status)?;
            memory.pieces.push(Handle(handle));
            offset += bytes;
        }
        Ok(memory)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    pub(crate) fn is_of_host(&self) -> bool {
        self.kind == ucx::UCS_MEMORY_TYPE_HOST
    }

    /// The address of a byte of the region, or the one after its last.
    fn address(&self, offset: u64) -> *mut c_void {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.region.address().as_ptr().wrapping_add(offset).cast()
    }

    /// How many bytes from an offset on lie in one piece.
    pub(crate) fn run(&self, offset: u64) -> u64 {
        (self.stride - offset % self.stride).min(self.bytes().saturating_sub(offset))
    }

    /// A range that lies in one piece.
    pub(super) fn place(&self, offset: u64, bytes: u64) -> Option<Place> {
        if bytes > self.run(offset) {
            return None;
        }
        let piece = usize::try_from(offset / self.stride).ok()?;
        let handle = self.pieces.get(piece)?.0;
        Some(Place { address: self.address(offset), handle })
    }

    /// What peers need of it.
    pub(crate) fn pack(&self) -> Result<Packed, Status> {
        let ucp = &self.context.library.ucp;
        let mut keys: Vec<Vec<u8>> = Vec::new();
        for piece in &self.pieces {
            let (mut buffer, mut length) = (ptr::null_mut(), 0);
            // SAFETY: the registration is there, and there are places for the key and its length.
            let status = unsafe {
                ucp.ucp_rkey_pack(self.context.handle, piece.0, &raw mut buffer, &raw mut length)
            };
            Status::check(status)?;
            // SAFETY: UCX has put that many bytes there.
            let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) }.to_vec();
            // SAFETY: it was given above, and is not used after this.
            unsafe { ucp.ucp_rkey_buffer_release(buffer) };
            keys.push(key);
        }
        // Fabrics without keys give the same for all memory.
        if keys.windows(2).all(|pair| pair[0] == pair[1]) {
            keys.truncate(1);
        }
        let address = self.address(0).addr() as u64;
        Ok(Packed { address, bytes: self.bytes(), stride: self.stride, keys })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for piece in &self.pieces {
            // SAFETY: it was registered with this context; whoever uses it holds this, so nobody does.
            let status = unsafe { self.context.library.ucp.ucp_mem_unmap(self.context.handle, piece.0) };
            if let Err(status) = Status::check(status) {
                let why = self.context.library.words(status.0);
                tracing::warn!(target: "kvx_ucx", "a registration cannot be ended: {why}");
            }
        }
    }
}
