//! What UCX logs goes to `tracing`, not to the standard output of a program that may print something else there.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// `UCS_LOG_FUNC_RC_STOP`: no other handler prints it. And its other: UCX's own goes on with it.
const STOP: c_int = 0;
const CONTINUE: c_int = 1;
const ERROR: c_int = 1;
const WARN: c_int = 2;
const DEBUG: c_int = 5;
/// Longest line that is kept, and most lines.
const LONGEST: usize = 512;
const MOST: usize = 64;

thread_local! {
    /// What this thread was told while it listens.
    static HEARD: RefCell<Option<Heard>> = const { RefCell::new(None) };
}

/// UCX's own handler is to have what comes, too: it writes to a file that the environment names.
static KEPT: AtomicBool = AtomicBool::new(false);
/// What is above this level was not asked for: it came only because somebody listens.
static ASKED: AtomicI32 = AtomicI32::new(c_int::MAX);

/// How the library is told where to log, and how much. They are no part of the interface that is promised.
#[derive(Clone, Copy)]
pub(crate) struct Logging {
    push: Push,
    get: Get,
    set: Set,
}

type Push = unsafe extern "C" fn(Handler);
type Get = unsafe extern "C" fn(name: *const c_char, value: *mut c_char, size: usize) -> i8;
type Set = unsafe extern "C" fn(name: *const c_char, value: *const c_char) -> i8;

impl Logging {
    /// Looks for it in a library that was opened.
    pub(crate) fn find(opened: &libloading::os::unix::Library) -> Option<Self> {
        // SAFETY: the function has had this type since UCX 1.10, and is not called after the library is closed, which it never is.
        let push = unsafe { opened.get::<Push>(c"ucs_log_push_handler") }.ok()?;
        // SAFETY: as above, for this one.
        let get = unsafe { opened.get::<Get>(c"ucs_global_opts_get_value") }.ok()?;
        // SAFETY: as above, for this one.
        let set = unsafe { opened.get::<Set>(c"ucs_global_opts_set_value") }.ok()?;
        Some(Self { push: *push, get: *get, set: *set })
    }

    fn level(self) -> Option<CString> {
        let mut text = [0_u8; 32];
        // SAFETY: the name ends with a zero, and the text has that many bytes.
        let status = unsafe { (self.get)(LEVEL.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).ok().filter(|_| status == 0)?;
        Some(text.to_owned())
    }

    fn set_level(self, level: &CStr) {
        // SAFETY: both texts end with zeros. That it fails changes nothing.
        let _ = unsafe { (self.set)(LEVEL.as_ptr(), level.as_ptr()) };
    }
}

/// The setting of UCX's that says how much it logs.
const LEVEL: &CStr = c"LOG_LEVEL";

/// Has the library log here. Where it cannot be, the library prints by itself.
pub(crate) fn attach(library: &Library) {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return;
    }
    if let Some(logging) = library.logging {
        KEPT.store(std::env::var_os("UCX_LOG_FILE").is_some_and(|file| !file.is_empty()), Relaxed);
        // SAFETY: the handler has the type that UCX calls it by, lasts for ever and does not unwind.
        unsafe { (logging.push)(handler) };
    }
}

/// Has the library log warnings while this is there, though it was told to be quieter: to be heard, and passed on to nobody.
struct Louder {
    logging: Logging,
    before: CString,
    /// One at a time.
    _alone: MutexGuard<'static, ()>,
}

impl Louder {
    /// `None` where it logs warnings anyway, or cannot be told.
    fn than(library: &Library) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let logging = library.logging?;
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = logging.level()?;
        let asked = match before.to_bytes().to_ascii_lowercase().as_slice() {
            b"fatal" => 0,
            b"error" => ERROR,
            _ => return None,
        };
        ASKED.store(asked, Relaxed);
        logging.set_level(c"warn");
        Some(Self { logging, before, _alone: alone })
    }
}

impl Drop for Louder {
    fn drop(&mut self) {
        self.logging.set_level(&self.before);
        ASKED.store(c_int::MAX, Relaxed);
    }
}

/// Warnings and errors of UCX that came while somebody listened, each once. Nobody else has been told of them.
#[derive(Debug, Default)]
pub(crate) struct Heard(Vec<Line>);

#[derive(Debug)]
struct Line {
    level: c_int,
    text: String,
    /// It would have come without anybody who listens, too.
    asked: bool,
}

impl Heard {
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|line| line.text.as_str())
    }

    /// Tells whoever is told what UCX logs, but for some lines.
    pub(crate) fn tell_but(&self, left_out: impl Fn(&str) -> bool) {
        for line in self.0.iter().filter(|line| line.asked && !left_out(&line.text)) {
            tell(line.level, &line.text);
        }
    }

    /// For an error that has them.
    pub(super) fn into_lines(self) -> Vec<String> {
        for line in self.0.iter().filter(|line| line.asked) {
            tell(DEBUG, &line.text);
        }
        self.0.into_iter().map(|line| line.text).collect()
    }
}

/// Runs something, and gives the warnings and errors of UCX that came with it on this thread. They are told to nobody yet: most come
/// with a call that fails, whose error has them.
pub(crate) fn listen<R>(library: &Library, act: impl FnOnce() -> R) -> (R, Heard) {
    let louder = Louder::than(library);
    HEARD.with(|heard| *heard.borrow_mut() = Some(Heard::default()));
    let result = act();
    let heard = HEARD.with(|heard| heard.borrow_mut().take()).unwrap_or_default();
    drop(louder);
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
    let asked = level <= ASKED.load(Relaxed);
    // Nothing may unwind into C: a panic of a subscriber ends here.
    let _ = std::panic::catch_unwind(|| {
        if !hear(level, &text, asked) && asked {
            tell(level, &text);
        }
    });
    if KEPT.load(Relaxed) && asked { CONTINUE } else { STOP }
}

/// Whether this thread listens for it.
fn hear(level: c_int, text: &str, asked: bool) -> bool {
    let hear = |heard: &RefCell<Option<Heard>>| {
        let mut heard = heard.try_borrow_mut().ok()?;
        let Heard(lines) = heard.as_mut().filter(|_| level <= WARN)?;
        if lines.len() < MOST && !lines.iter().any(|line| line.text == text) {
            lines.push(Line { level, text: text.to_owned(), asked });
        }
        Some(())
    };
    // A thread that is ending listens no more.
    matches!(HEARD.try_with(hear), Ok(Some(())))
}

fn tell(level: c_int, text: &str) {
    // Its own handler has it.
    if KEPT.load(Relaxed) {
        return;
    }
    match level {
        ..=ERROR => tracing::error!(target: "ucx", "{text}"),
        WARN => tracing::warn!(target: "ucx", "{text}"),
        3 | 4 => tracing::info!(target: "ucx", "{text}"),
        DEBUG => tracing::debug!(target: "ucx", "{text}"),
        _ => tracing::trace!(target: "ucx", "{text}"),
    }
}
