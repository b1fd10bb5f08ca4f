//! A context: what UCX found on this machine, with its settings.

use std::ffi::{CString, c_char};
use std::fmt;
use std::ptr;

use super::Status;
use super::bindings::types as ucx;
use super::library::{API, Library};
use super::log::{self, Heard};

/// What is asked of UCX. Not atomic operations: there are cards that refuse to register memory for them (known failure 87:
/// mori#497), and UCX registers it for what is asked only.
const FEATURES: u32 = ucx::UCP_FEATURE_RMA | ucx::UCP_FEATURE_TAG | ucx::UCP_FEATURE_AM | ucx::UCP_FEATURE_WAKEUP;

/// A context that several threads may use.
pub(crate) struct Context {
    pub(super) library: &'static Library,
    pub(super) handle: ucx::ucp_context_h,
    memory_types: u64,
    /// Warnings that came when it was made.
    pub(crate) said: Heard,
}

// SAFETY: it is made with `mt_workers_shared`: UCX locks it.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("library", &self.library).finish_non_exhaustive()
    }
}

/// A call that failed, and what UCX said about it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) status: Status,
    pub(crate) said: Vec<String>,
}

impl Context {
    /// Opens what the machine has. Settings are UCX's own, without the prefix `UCX_`; they go before the environment. Of those that
    /// are preferred it may do without.
    pub(crate) fn new(
        library: &'static Library,
        settings: &[(String, String)],
        preferred: &[(String, String)],
    ) -> Result<Self, Failure> {
        let ucp = &library.ucp;
        let mut config = ptr::null_mut();
        let (status, said) = log::listen(library, || {
            // SAFETY: no prefix and no file, and a place for the result.
            unsafe { ucp.ucp_config_read(ptr::null(), ptr::null(), &raw mut config) }
        });
        fail("ucp_config_read", status, || said.into_lines())?;
        let config = Config { library, handle: config };
        for (name, value) in settings {
            let (status, said) = log::listen(library, || config.modify(name, value));
            // Which one it was, before what was said of it.
            fail("ucp_config_modify", status, || {
                std::iter::once(format!("{name}={value}")).chain(said.into_lines()).collect()
            })?;
        }
        for (name, value) in preferred {
            config.modify(name, value);
        }
        let params = ucx::ucp_params {
            field_mask: u64::from(ucx::UCP_PARAM_FIELD_FEATURES | ucx::UCP_PARAM_FIELD_MT_WORKERS_SHARED),
            features: u64::from(FEATURES),
            mt_workers_shared: 1,
            ..ucx::ucp_params::default()
        };
        let mut handle = ptr::null_mut();
        let (status, said) = log::listen(library, || {
            // SAFETY: the parameters say which of their fields are set; the configuration is there until the call is over.
            unsafe { ucp.ucp_init_version(API.0, API.1, &raw const params, config.handle, &raw mut handle) }
        });
        if status < 0 {
            return Err(Failure { call: "ucp_init", status: Status(status), said: said.into_lines() });
        }
        let mut context = Self { library, handle, memory_types: 0, said };
        let mut attributes = ucx::ucp_context_attr {
            field_mask: u64::from(ucx::UCP_ATTR_FIELD_MEMORY_TYPES),
            ..ucx::ucp_context_attr::default()
        };
        // SAFETY: the context is there, and only the field that the mask names is written.
        let status = unsafe { ucp.ucp_context_query(handle, &raw mut attributes) };
        fail("ucp_context_query", status, Vec::new)?;
        context.memory_types = attributes.memory_types;
        Ok(context)
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    /// Whether memory of this kind can be registered, as the library was built and finds its drivers.
    pub(crate) fn knows(&self, kind: kvx_core::memory::MemoryKind) -> bool {
        super::memory::memory_type(kind).is_some_and(|kind| self.memory_types & (1 << kind) != 0)
    }

    /// Transports and devices that it may use, sorted: `tcp/eth0`.
    pub(crate) fn resources(&self) -> Vec<String> {
        let text = print(|stream| {
            // SAFETY: the context is there, and the stream is open for writing.
            unsafe { self.library.ucp.ucp_context_print_info(self.handle, stream) };
        });
        let resources = text.lines().filter(|line| line.contains("resource "));
        let mut names: Vec<_> = resources.filter_map(|line| Some(line.rsplit_once(' ')?.1.to_owned())).collect();
        names.sort();
        names.dedup();
        names
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: whatever belongs to it holds it, so nothing does any more.
        unsafe { self.library.ucp.ucp_cleanup(self.handle) };
    }
}

struct Config {
    library: &'static Library,
    handle: *mut ucx::ucp_config_t,
}

impl Config {
    fn modify(&self, name: &str, value: &str) -> ucx::ucs_status_t {
        let text = |text: &str| CString::new(text).unwrap_or_default();
        let (name, value) = (text(name), text(value));
        // SAFETY: the configuration is there, and the texts end with zeros.
        unsafe { self.library.ucp.ucp_config_modify(self.handle, name.as_ptr(), value.as_ptr()) }
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: it was read, and is not used after this.
        unsafe { self.library.ucp.ucp_config_release(self.handle) };
    }
}

pub(super) fn fail(
    call: &'static str,
    status: i8,
    said: impl FnOnce() -> Vec<String>,
) -> Result<(), Failure> {
    Status::check(status).map_err(|status| Failure { call, status, said: said() })
}

/// What a function prints to a stream of C's.
pub(super) fn print(act: impl FnOnce(*mut ucx::FILE)) -> String {
    let (mut text, mut bytes) = (ptr::null_mut::<c_char>(), 0_usize);
    // SAFETY: places for the text and its length, which live until the stream is closed.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut bytes) };
    if stream.is_null() {
        return String::new();
    }
    act(stream.cast());
    // SAFETY: it was opened above, and is not used after this.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: closing the stream has left that many bytes there.
    let printed = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), bytes) };
    let printed = String::from_utf8_lossy(printed).into_owned();
    // SAFETY: the stream made it with `malloc`, and nobody else has it.
    unsafe { libc::free(text.cast()) };
    printed
}

#[cfg(test)]
mod tests {
    use super::{FEATURES, ucx};

    /// Known failure 87: memory was registered for remote atomic operations that nobody used, and some cards refuse that.
    #[test]
    fn no_atomic_operations_are_asked_for() {
        assert_eq!(FEATURES & (ucx::UCP_FEATURE_AMO32 | ucx::UCP_FEATURE_AMO64), 0);
    }
}
