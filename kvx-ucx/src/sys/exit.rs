//! The end of the process: what is to be done before UCX's own destructors run.

use std::sync::Once;

/// Has a function called when the process ends, before the destructors of libraries: once, however often this is called.
pub(crate) fn before_destructors(act: fn()) {
    static ACT: std::sync::OnceLock<fn()> = std::sync::OnceLock::new();
    static ONCE: Once = Once::new();
    extern "C" fn call() {
        if let Some(act) = ACT.get() {
            // Nothing may unwind into C.
            let _ = std::panic::catch_unwind(act);
        }
    }
    ONCE.call_once(|| {
        let _ = ACT.set(act);
        // SAFETY: the function lives as long as the process, and does not unwind. Where there is no room for it, it is not called.
        unsafe { libc::atexit(call) };
    });
}
