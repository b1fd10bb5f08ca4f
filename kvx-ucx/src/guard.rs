//! What is looked at before UCX is opened, where it would end the process instead of saying no.

use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Result};
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};

use crate::error::BACKEND;
use crate::nonsense;

/// Settings without which UCX (1.13 to 1.22) crashes where it cannot read them: numbers.
const NUMBERS: &[&str] = &["UCX_MAX_EAGER_LANES", "UCX_MAX_RNDV_LANES", "UCX_MAX_RMA_LANES"];

/// Descriptors that opening may take at a time: some fifteen were seen, and two for each interface.
const DESCRIPTORS: u64 = 24;
const OF_AN_INTERFACE: u64 = 2;

/// Bytes of address space that opening takes, at least: with 20 MiB it ended the process, with 40 it did not.
const BYTES: u64 = 64 << 20;

/// Looks at the environment and at limits. One backend is opened at a time while the answer lives, so that no other takes what was counted.
pub(crate) fn check() -> Result<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    settings(|name| std::env::var(name).ok())?;
    for (name, value) in std::env::vars_os() {
        if let (Some(name), Some(value)) = (name.to_str(), value.to_str())
            && let Some(name) = name.strip_prefix("UCX_")
        {
            nonsense::check("open", "UCX_", name, value)?;
        }
    }
    descriptors()?;
    match limits::room() {
        Some(room) if room < BYTES => Err(resources("there is too little address space", io::ErrorKind::OutOfMemory.into())
            .with_context("bytes", room)
            .with_context("needed", BYTES)
            .with_remedy("let this process have more address space: ulimit -v")),
        _ => Ok(alone),
    }
}

fn resources(message: &'static str, cause: io::Error) -> Error {
    Error::new(ErrorKind::Resources, "open", message).with_backend(BACKEND).with_source(cause)
}

fn descriptors() -> Result<()> {
    let Some(most) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let count = |path: &str| std::fs::read_dir(path).map(|entries| entries.count() as u64);
    let refused = |open: u64, needed: u64, cause: io::Error| {
        let error = Error::new(ErrorKind::Resources, "open", "UCX needs more descriptors than there are left")
            .with_backend(BACKEND)
            .with_context("open", open)
            .with_context("needed", needed)
            .with_context("limit", most);
        Err(limits::explain(error, cause, Wanted::Descriptor))
    };
    let needed = DESCRIPTORS + OF_AN_INTERFACE * count("/sys/class/net").unwrap_or(0);
    let none_left = || io::Error::from_raw_os_error(libc::EMFILE);
    match count("/proc/self/fd") {
        Ok(open) if open.saturating_add(needed) > most => refused(open, needed, none_left()),
        Err(cause) if cause.raw_os_error() == Some(libc::EMFILE) => refused(most, needed, cause),
        _ => Ok(()),
    }
}

fn settings(value: impl Fn(&str) -> Option<String>) -> Result<()> {
    let wrong = |name: &'static str, value: &str, why: &str| {
        Error::config("open", format!("{name}: {why}")).with_backend(BACKEND).with_context("value", value)
    };
    for name in NUMBERS {
        if let Some(value) = value(name).filter(|value| !is_number(value)) {
            let error = wrong(name, &value, "this is no number, and UCX would end the process");
            return Err(error.with_remedy("write a number, or inf; or leave it out"));
        }
    }
    let Some(file) = value("UCX_LOG_FILE").filter(|file| !file.is_empty()) else { return Ok(()) };
    if matches!(&*file, "stdout" | "stderr" | "syslog") || is_writable(&file) {
        return Ok(());
    }
    let error = wrong("UCX_LOG_FILE", &file, "nothing can be written there, and UCX would end the process");
    Err(error.with_remedy("name a file in a folder that is there and may be written to, or stderr"))
}

/// As UCX reads numbers: what follows the digits is nobody's business.
fn is_number(value: &str) -> bool {
    let value = value.trim_start();
    value.eq_ignore_ascii_case("inf") || value.strip_prefix(['-', '+']).unwrap_or(value).starts_with(|first: char| first.is_ascii_digit())
}

/// Whether a log can be written there. Behind a colon may be how long it may become, and `%` stands for what UCX puts in.
fn is_writable(file: &str) -> bool {
    let path = Path::new(file.split(':').next().unwrap_or(file));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    if folder.to_string_lossy().contains('%') {
        return true;
    }
    let may = |path: &Path| access(path, Access::WRITE_OK).is_ok();
    !path.is_dir() && if path.exists() { may(path) } else { folder.is_dir() && may(folder) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_end_the_process_is_refused_by_name() {
        let said = |name: &str, text: &str| settings(|asked| (asked == name).then(|| text.to_owned()));
        for name in NUMBERS {
            for right in ["1", "inf", " 3", "-1", "2x"] {
                assert!(said(name, right).is_ok(), "{name}={right}");
            }
            for wrong in ["", "junk", "auto", "x2"] {
                let error = said(name, wrong).unwrap_err();
                assert!(error.kind() == ErrorKind::Config && error.message().contains(name), "{error}");
            }
        }
        let here = std::env::temp_dir();
        let file = here.join("kvx-ucx-no-such-log-%p");
        for right in ["", "stderr", "log", "%h/log", file.to_str().unwrap(), &format!("{}:10m", file.display())] {
            assert!(said("UCX_LOG_FILE", right).is_ok(), "{right}");
        }
        for wrong in ["/nonexistent/x", "/dev/null/x", here.to_str().unwrap()] {
            let error = said("UCX_LOG_FILE", wrong).unwrap_err();
            assert!(error.message().starts_with("UCX_LOG_FILE") && error.remedy().is_some(), "{error}");
        }
    }
}
