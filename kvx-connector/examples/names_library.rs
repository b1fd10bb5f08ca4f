//! A C library that says which backends are in it: as an engine written in another language would load it.

/// Writes the names of the backends in this library, one a line, to `buffer`, which has room for `bytes` bytes. Returns how
/// many bytes the names need; nothing is written when that is more than there is room for, or when the result is -1: the
/// registry is in error.
///
/// # Safety
///
/// `buffer` must be valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_backend_names(buffer: *mut u8, bytes: usize) -> isize {
    let Ok(backends) = kvx_connector::backends() else { return -1 };
    let names: String = backends.iter().map(|backend| format!("{}\n", backend.name)).collect();
    if names.len() <= bytes {
        // SAFETY: the caller vouches for `bytes` bytes of `buffer`, which is memory of its own.
        unsafe { buffer.copy_from_nonoverlapping(names.as_ptr(), names.len()) };
    }
    names.len().cast_signed()
}
