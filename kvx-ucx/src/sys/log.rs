//! What UCX logs goes to `tracing`, not to the standard output of a program that may print something else there.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::library::Library;

/// `ucs_log_func_t`. A `va_list` is passed by address on the platforms that there are.
type Handler = unsafe extern "C" fn(
    file: *const c_char,
    line: c_uint,
    function: *const c_char,
    level: c_int,
    component: *const c_void,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int;

// SAFETY: C's, in every libc that UCX runs with, declared as there but for the `va_list`, as for `Handler`.
unsafe extern "C" {
    fn vsnprintf(to: *mut c_char, size: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// `UCS_LOG_FUNC_RC_STOP`: no other handler prints it.
const STOP: c_int = 0;
const ERROR: c_int = 1;
const WARN: c_int = 2;
/// Longest line that is kept.
const LONGEST: usize = 512;

thread_local! {
    /// What this thread was told while it listens.
    static HEARD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Has the library log here. Where it cannot be, the library prints by itself.
pub(crate) fn attach(library: &Library) {
    let own = std::env::var_os("UCX_LOG_FILE").is_some();
    if own || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return;
    }
    if let Some(push) = library.log_push_handler {
        // SAFETY: the handler has the type that UCX calls it by, lasts for ever and does not unwind.
        unsafe { push(handler) };
    }
}

pub(crate) type Push = unsafe extern "C" fn(Handler);

/// Runs something, and gives the warnings and errors of UCX that came with it on this thread.
pub(crate) fn listen<R>(act: impl FnOnce() -> R) -> (R, Vec<String>) {
    HEARD.with(|heard| *heard.borrow_mut() = Some(Vec::new()));
    let result = act();
    let heard = HEARD.with(|heard| heard.borrow_mut().take()).unwrap_or_default();
    (result, heard)
}

// SAFETY: to be called by UCX only, with a format that ends with a zero and the arguments for it.
unsafe extern "C" fn handler(
    _: *const c_char,
    _: c_uint,
    _: *const c_char,
    level: c_int,
    _: *const c_void,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    let mut line = [0_u8; LONGEST];
    // SAFETY: the line has that many bytes; format and arguments are what UCX gave for each other.
    let written = unsafe { vsnprintf(line.as_mut_ptr().cast(), LONGEST, format, arguments) };
    if written < 0 {
        return STOP;
    }
    let text = CStr::from_bytes_until_nul(&line).unwrap_or_default().to_string_lossy();
    // Nothing may unwind into C: a panic of a subscriber ends here.
    let _ = std::panic::catch_unwind(|| tell(level, &text));
    STOP
}

fn tell(level: c_int, text: &str) {
    if level <= WARN {
        let heard = HEARD.try_with(|heard| {
            if let Ok(mut heard) = heard.try_borrow_mut()
                && let Some(heard) = heard.as_mut().filter(|heard| heard.len() < 64)
            {
                heard.push(text.to_owned());
            }
        });
        // A thread that is ending listens no more.
        let _ = heard;
    }
    match level {
        ..=ERROR => tracing::error!(target: "ucx", "{text}"),
        WARN => tracing::warn!(target: "ucx", "{text}"),
        3 | 4 => tracing::info!(target: "ucx", "{text}"),
        5 => tracing::debug!(target: "ucx", "{text}"),
        _ => tracing::trace!(target: "ucx", "{text}"),
    }
}
