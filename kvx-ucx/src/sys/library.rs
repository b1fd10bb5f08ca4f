//! The library, opened at run time: which one, and whether it has all that is called.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Opened, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};

use super::bindings::functions::Ucp;
use super::elf::{self, Cut, Wrong};
use super::log;

/// The API that is asked for: what Debian 12 has.
pub(crate) const API: (u32, u32) = (1, 13);

/// The variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_UCX_LIB";

/// Where it is looked for when nothing names it.
const NAMES: [&str; 2] = ["libucp.so.0", "libucp.so"];

/// What `libucp` needs. Where the loader does not find it, it is opened from beside it: a directory that was unpacked anywhere
/// will do.
const BESIDE: [&str; 3] = ["libucm.so.0", "libucs.so.0", "libuct.so.0"];

/// The folder of those that UCX opens by itself, one for each sort of device.
const MODULES: &str = "ucx";

/// UCX, opened. It is never closed: it leaves hooks in the process.
pub(crate) struct Library {
    pub(crate) ucp: Ucp,
    /// As it was named.
    pub(crate) path: String,
    pub(crate) version: (u32, u32, u32),
    /// Where it can be told where to log.
    pub(crate) logging: Option<log::Logging>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Why there is no library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It is not there, or is no library.
    Library(String),
    /// Its file, or that of one that it needs, ends too soon.
    Cut { path: String, cut: Cut },
    /// It is nothing that can be opened, or of another processor.
    Foreign { path: String, what: &'static str },
    /// It lacks a function.
    Symbol { path: String, name: &'static str },
    /// It is older than what is asked for.
    Old { path: String, version: (u32, u32, u32) },
    /// This process has another one.
    Other { path: String, loaded: String },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(why) => write!(f, "UCX cannot be opened: {why}"),
            Self::Cut { path, cut: Cut { bytes, said } } => {
                write!(f, "{path} is cut off: it has {bytes} bytes, and says that it has {said}")
            }
            Self::Foreign { path, what } => write!(f, "{path} {what}"),
            Self::Symbol { path, name } => write!(f, "{path} has no function {name}"),
            Self::Old { path, version: (major, minor, patch) } => {
                write!(f, "{path} is UCX {major}.{minor}.{patch}, and kvx needs {}.{}", API.0, API.1)
            }
            Self::Other { path, loaded } => {
                write!(f, "{path} was asked for, and this process has opened {loaded}")
            }
        }
    }
}

impl Missing {
    pub(crate) fn remedy(&self) -> String {
        match self {
            Self::Other { .. } => "use one UCX library per process".to_owned(),
            Self::Cut { .. } => "copy or install it once more".to_owned(),
            Self::Foreign { .. } => format!("name another with the option lib or in {VARIABLE}"),
            _ => format!(
                "install UCX {}.{} or later (Debian and Ubuntu: apt-get install libucx0; Python: pip install libucx-cu12), or name \
                 its libucp.so.0 with the option lib or in {VARIABLE}",
                API.0, API.1
            ),
        }
    }
}

static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);

/// Opens the library that is named, or else that of the environment, or else the system's.
pub(crate) fn load(named: Option<&str>) -> Result<&'static Library, Missing> {
    let environment = std::env::var(VARIABLE).ok().filter(|path| !path.is_empty());
    let named = named.map(str::to_owned).or(environment).map(|path| {
        if Path::new(&path).is_dir() { format!("{}/{}", path.trim_end_matches('/'), NAMES[0]) } else { path }
    });
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = *loaded {
        return match named.filter(|path| !same(path, &known.path)) {
            None => Ok(known),
            Some(path) => Err(Missing::Other { path, loaded: known.path.clone() }),
        };
    }
    let candidates = named.map_or_else(|| NAMES.map(str::to_owned).to_vec(), |path| vec![path]);
    let mut first = None;
    for path in candidates {
        match open(&path) {
            Ok(library) => {
                let library: &'static Library = Box::leak(Box::new(library));
                *loaded = Some(library);
                log::attach(library);
                return Ok(library);
            }
            Err(missing) => first = first.or(Some(missing)),
        }
    }
    Err(first.unwrap_or_else(|| Missing::Library("no name".to_owned())))
}

/// Whether two names are one file.
fn same(one: &str, other: &str) -> bool {
    let real = |path: &str| std::fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    one == other || real(one) == real(other)
}

/// What the loader says: which file, and what is wrong with it.
fn why(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// Looks whether a library that is named by its path, and those that lie beside it, have all their bytes. Where the loader would look
/// for one that is not is its own business.
fn check(path: &Path) -> Result<(), Missing> {
    let Some(directory) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else { return Ok(()) };
    let modules = std::fs::read_dir(directory.join(MODULES)).into_iter().flatten().flatten().map(|entry| entry.path());
    let modules = modules.filter(|path| path.to_string_lossy().contains(".so"));
    let all = BESIDE.iter().map(|name| directory.join(name)).chain(modules);
    for path in std::iter::once(path.to_owned()).chain(all) {
        elf::check(&path).map_err(|wrong| match (path.display().to_string(), wrong) {
            (path, Wrong::Cut(cut)) => Missing::Cut { path, cut },
            (path, Wrong::NoFile) => Missing::Foreign { path, what: "is no file" },
            (path, Wrong::Processor) => Missing::Foreign { path, what: "is of another processor than this program's" },
        })?;
    }
    Ok(())
}

fn open(path: &str) -> Result<Library, Missing> {
    check(Path::new(path))?;
    let open = |path: &Path, flags| {
        // SAFETY: UCX's initialisers may run at any time, on any thread; it is never closed, so what they leave stays valid.
        unsafe { Opened::open(Some(path), flags) }
    };
    let first = open(Path::new(path), RTLD_NOW | RTLD_LOCAL);
    let opened = first.or_else(|error| {
        let beside = Path::new(path).parent().filter(|parent| !parent.as_os_str().is_empty());
        let Some(directory) = beside.filter(|directory| BESIDE.iter().any(|name| directory.join(name).exists())) else {
            return Err(error);
        };
        let mut first = None;
        for name in BESIDE {
            // They name each other in a circle, so each must be seen by those before it.
            match open(&directory.join(name), RTLD_LAZY | RTLD_GLOBAL) {
                Ok(needed) => std::mem::forget(needed),
                Err(error) => first = first.or(Some(error)),
            }
        }
        // Whichever could not be opened is what the others lack.
        open(Path::new(path), RTLD_NOW | RTLD_LOCAL).map_err(|error| first.unwrap_or(error))
    });
    let opened = opened.map_err(|error| Missing::Library(why(&error)))?;
    let logging = log::Logging::find(&opened);
    // SAFETY: the library is UCX by its name, and its functions have had these types since 1.13.
    let ucp = unsafe { Ucp::from_library(opened) }
        .map_err(|error| Missing::Library(why(&error)))?;
    let path = path.to_owned();
    if let Some(name) = lacking(&ucp) {
        std::mem::forget(ucp);
        return Err(Missing::Symbol { path, name });
    }
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three numbers to write to.
    unsafe { ucp.ucp_get_version(&raw mut major, &raw mut minor, &raw mut patch) };
    let version = (major, minor, patch);
    if (major, minor) < API || major != API.0 {
        std::mem::forget(ucp);
        return Err(Missing::Old { path, version });
    }
    Ok(Library { ucp, path, version, logging })
}

/// The first function that is not there. Calling one that is not would panic.
fn lacking(ucp: &Ucp) -> Option<&'static str> {
    macro_rules! check {
        ($($name:ident)*) => { $(if ucp.$name.is_err() { return Some(stringify!($name)); })* };
    }
    check! {
        ucs_status_string ucp_get_version ucp_config_read ucp_config_modify ucp_config_release ucp_init_version ucp_cleanup
        ucp_context_query ucp_context_print_info ucp_worker_create ucp_worker_destroy ucp_worker_get_address
        ucp_worker_release_address ucp_worker_get_efd ucp_worker_arm ucp_worker_progress ucp_worker_set_am_recv_handler
        ucp_mem_map ucp_mem_unmap ucp_rkey_pack ucp_rkey_buffer_release ucp_ep_create ucp_ep_close_nbx ucp_ep_print_info
        ucp_ep_rkey_unpack ucp_rkey_destroy ucp_get_nbx ucp_put_nbx ucp_ep_flush_nbx ucp_am_send_nbx
        ucp_tag_send_nbx ucp_tag_recv_nbx ucp_tag_probe_nb ucp_tag_msg_recv_nbx ucp_dt_create_generic ucp_dt_destroy
        ucp_request_cancel ucp_request_free
    }
    None
}

impl Library {
    /// What a status means, in UCX's words.
    pub(crate) fn words(&self, status: i8) -> String {
        // SAFETY: it takes any number, and gives a text that lasts.
        let text = unsafe { self.ucp.ucs_status_string(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: not null, and ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Whether it ends the process when a worker is destroyed while UCX's own answer to a peer that is gone has not been sent:
    /// 1.13 was seen to, 1.20 was not.
    pub(crate) fn is_fragile(&self) -> bool {
        self.version < (1, 20, 0)
    }

    pub(crate) fn version_text(&self) -> String {
        let (major, minor, patch) = self.version;
        format!("{major}.{minor}.{patch}")
    }
}
