//! A key to a peer's region.

use std::ptr;

use super::Status;
use super::bindings::types as ucx;
use super::endpoint::{Endpoint, padded};
use super::library::Library;

/// A key to a peer's region. Made, used and dropped under the lock of its worker.
#[derive(Debug)]
pub(crate) struct Key {
    library: &'static Library,
    address: u64,
    bytes: u64,
    /// Bytes of each piece but the last.
    stride: u64,
    /// Of each piece, or one for all.
    pieces: Vec<ucx::ucp_rkey_h>,
    /// The peer's number for the region.
    pub(super) region: (u32, u32),
    /// The peer's memory domains that all pieces are registered with, a bit each, and the kind of memory.
    domains: u64,
    kind: u8,
}

// SAFETY: it belongs to a worker that is not bound to a thread, and is used under the same lock.
unsafe impl Send for Key {}
// SAFETY: as for `Send`; it does not change.
unsafe impl Sync for Key {}

/// Where a range lies in the peer's memory.
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) handle: ucx::ucp_rkey_h,
}

impl Key {
    /// The key to a region that the peer knows by a number: to `bytes` bytes from an address on, in pieces of `stride`, from UCX's
    /// packed keys to each piece, or one for all of them.
    pub(crate) fn new<'a>(
        endpoint: &Endpoint,
        region: (u32, u32),
        (address, bytes, stride): (u64, u64, u64),
        packed: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Result<Self, Status> {
        let invalid = Err(Status(ucx::UCS_ERR_INVALID_PARAM));
        if bytes == 0 || stride == 0 || address.checked_add(bytes).is_none() {
            return invalid;
        }
        let count = packed.len() as u64;
        if count != 1 && count != bytes.div_ceil(stride) {
            return invalid;
        }
        let library = endpoint.library();
        let (mut domains, mut kind) = (u64::MAX, 0);
        let mut key = Self { library, address, bytes, stride, pieces: Vec::new(), region, domains, kind };
        for packed in packed {
            let Some((map, of)) = packed.split_first_chunk::<8>().filter(|_| is_whole(packed)) else {
                return invalid;
            };
            domains &= u64::from_le_bytes(*map);
            kind |= of.first().copied().unwrap_or(0);
            let packed = padded(packed);
            let mut handle = ptr::null_mut();
            // SAFETY: the endpoint is there; the key was checked to hold what its lengths say, and is followed by zeros.
            let status = unsafe {
                library.ucp.ucp_ep_rkey_unpack(
                    endpoint.handle,
                    packed.as_ptr().cast(),
                    &raw mut handle,
                )
            };
            Status::check(status)?;
            key.pieces.push(handle);
        }
        (key.domains, key.kind) = (domains, kind);
        Ok(key)
    }

    /// The peer's memory domains by which all of it can be reached, a bit each.
    pub(super) fn domains(&self) -> u64 {
        self.domains
    }

    pub(super) fn is_of_host(&self) -> bool {
        ucx::ucs_memory_type_t::from(self.kind) == ucx::UCS_MEMORY_TYPE_HOST
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many bytes from an offset on lie in one piece.
    pub(crate) fn run(&self, offset: u64) -> u64 {
        (self.stride - offset % self.stride).min(self.bytes.saturating_sub(offset))
    }

    /// A range that lies in one piece.
    pub(super) fn place(&self, offset: u64, bytes: u64) -> Option<Place> {
        if bytes > self.run(offset) {
            return None;
        }
        let handle = match self.pieces.as_slice() {
            [all] => *all,
            pieces => *pieces.get(usize::try_from(offset / self.stride).ok()?)?,
        };
        Some(Place { address: self.address + offset, handle })
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        for piece in &self.pieces {
            // SAFETY: it was unpacked, and whoever uses it holds this, so nobody does.
            unsafe { self.library.ucp.ucp_rkey_destroy(*piece) };
        }
    }
}

/// Whether a packed key has all the bytes that its lengths announce: a map of memory domains (a bit each), the kind of memory,
/// then for each domain a length and as many bytes.
fn is_whole(packed: &[u8]) -> bool {
    let Some((map, rest)) = packed.split_first_chunk::<8>() else { return false };
    let Some((_, mut rest)) = rest.split_first() else { return false };
    for _ in 0..u64::from_le_bytes(*map).count_ones() {
        let Some((length, after)) = rest.split_first() else { return false };
        let Some(after) = after.get(usize::from(*length)..) else { return false };
        rest = after;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::is_whole;

    #[test]
    fn a_key_that_announces_more_than_it_has_is_refused() {
        assert!(is_whole(&[0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert!(is_whole(&[3, 0, 0, 0, 0, 0, 0, 0, 0, 1, 9, 0]));
        assert!(is_whole(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 9, 9, 7, 7]));
        assert!(!is_whole(&[]) && !is_whole(&[0; 8]));
        assert!(!is_whole(&[1, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert!(!is_whole(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 9]));
        assert!(!is_whole(&[0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    }
}
