//! Backends known to this program, registered at link time.
//!
//! A backend's crate says [`register_backend!`](crate::register_backend); this module lists what was said. Because a linker
//! drops a crate that nothing refers to, and its registration with it, whoever wants a backend must also name its
//! `REGISTRATION`: the connector does so for the built-in ones, a vendor's application for its own.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
#[doc(hidden)]
pub use inventory;

use crate::backend::TransferBackend;
use crate::config::BackendConfig;
use crate::error::{Error, ErrorKind, Result};

/// One backend, as it registers itself.
pub struct Registration {
    /// Its name, as it is chosen: lower case, no spaces.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// How good a choice it is when nobody names one: higher is better, `None` is never chosen unasked.
    pub rank: Option<u32>,
    /// Whether it can be used here, cheaply and without keeping anything open.
    pub probe: fn(&BackendConfig) -> Probe,
    /// What opens it.
    pub opener: &'static dyn Opener,
    /// In what two [places](crate::capability::Capabilities::place) differ, this side's and a peer's, for people. `None` of a backend that
    /// has no place; it gives `None` of a place that it cannot read.
    pub apart: Option<fn(here: &str, there: &str) -> Option<Apart>>,
}

/// What keeps two sides apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Apart {
    /// In what they differ, and why that matters.
    pub why: String,
    /// How to bring them together.
    pub remedy: String,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("name", &self.name)
            .field("about", &self.about)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

/// Opens a backend.
#[async_trait]
pub trait Opener: Send + Sync {
    /// Opens it with `config`. Options that it does not know are refused
    /// ([`BackendConfig::refuse_unknown`]).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a bad option, [`ErrorKind::Unsupported`] when it cannot be used here (as its probe says),
    /// [`ErrorKind::Resources`] or [`ErrorKind::Fabric`] when it fails.
    async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>>;
}

/// Whether a backend can be used here.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Probe {
    /// It can.
    Available {
        /// What was found: library version, devices, transports.
        detail: String,
        /// What it would be able to do.
        capabilities: Box<crate::capability::Capabilities>,
    },
    /// It was not looked for, because its options are wrong. Opening it with them is an
    /// [`ErrorKind::Config`] error.
    BadOptions {
        /// What is wrong with them.
        reason: String,
        /// What to write instead.
        remedy: Option<String>,
    },
    /// It cannot.
    Unavailable {
        /// Why.
        reason: String,
        /// What to install or change.
        remedy: Option<String>,
    },
}

impl Probe {
    /// Options are wrong, as `error` says. `remedy` is what to write instead, where the error does not say so itself.
    #[must_use]
    pub fn bad_options(error: &Error, remedy: impl Into<String>) -> Self {
        let mut reason = error.message().to_owned();
        let facts: Vec<_> =
            error.context().iter().map(|(name, value)| format!("{name}={value}")).collect();
        if !facts.is_empty() {
            reason.push_str(&format!(" ({})", facts.join(", ")));
        }
        let remedy = error.remedy().map_or_else(|| remedy.into(), ToOwned::to_owned);
        Self::BadOptions { reason, remedy: Some(remedy) }
    }
}

/// What `register_backend!` submits.
#[doc(hidden)]
#[derive(Debug)]
pub struct Submitted(pub &'static Registration);

inventory::collect!(Submitted);

/// Registers a backend: defines `pub static REGISTRATION` in the calling module and submits it to the registry.
///
/// ```
/// # use std::sync::Arc;
/// # use kvx_core::{Result, backend::TransferBackend, config::BackendConfig};
/// use kvx_core::registry::{Opener, Probe};
///
/// struct Open;
///
/// #[async_trait::async_trait]
/// impl Opener for Open {
///     async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
///         config.refuse_unknown(&["device"])?;
///         # Err(kvx_core::Error::unsupported("open", "an example"))
///     }
/// }
///
/// fn probe(_: &BackendConfig) -> Probe {
///     Probe::Unavailable { reason: "an example".into(), remedy: None }
/// }
///
/// kvx_core::register_backend! {
///     name: "example",
///     about: "An example",
///     rank: Some(10),
///     probe: probe,
///     opener: Open,
/// }
/// # fn main() {
/// assert_eq!(kvx_core::registry::find("example").unwrap().about, "An example");
/// # }
/// ```
#[macro_export]
macro_rules! register_backend {
    (
        name: $name:expr,
        about: $about:expr,
        rank: $rank:expr,
        probe: $probe:expr,
        opener: $opener:expr $(,)?
    ) => {
        $crate::register_backend! {
            name: $name,
            about: $about,
            rank: $rank,
            probe: $probe,
            opener: $opener,
            apart: None,
        }
    };
    (
        name: $name:expr,
        about: $about:expr,
        rank: $rank:expr,
        probe: $probe:expr,
        opener: $opener:expr,
        apart: $apart:expr $(,)?
    ) => {
        /// This backend's entry in the registry. Name it (`let _ = &REGISTRATION;` will do) in any program that wants the
        /// backend, or the linker drops the crate.
        pub static REGISTRATION: $crate::registry::Registration = $crate::registry::Registration {
            name: $name,
            about: $about,
            rank: $rank,
            probe: $probe,
            opener: &$opener,
            apart: $apart,
        };
        $crate::registry::inventory::submit! {
            $crate::registry::Submitted(&REGISTRATION)
        }
    };
}

/// All registered backends, sorted by name.
///
/// # Errors
///
/// [`ErrorKind::Config`] when two have the same name.
pub fn registered() -> Result<Vec<&'static Registration>> {
    sorted(inventory::iter::<Submitted>.into_iter().map(|submitted| submitted.0))
}

fn sorted(all: impl Iterator<Item = &'static Registration>) -> Result<Vec<&'static Registration>> {
    let mut list: Vec<_> = all.collect();
    list.sort_by_key(|registration| registration.name);
    if let Some(pair) = list.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::config(
            "registry",
            format!("two backends are named {:?}", pair[0].name),
        )
        .with_context("first", pair[0].about)
        .with_context("second", pair[1].about)
        .with_remedy("build with only one of them, or rename one"));
    }
    Ok(list)
}

/// The backend of this name.
///
/// # Errors
///
/// [`ErrorKind::Config`]: there is none; the error lists those that are registered.
pub fn find(name: &str) -> Result<&'static Registration> {
    let all = registered()?;
    all.iter().find(|registration| registration.name == name).copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|registration| registration.name).collect();
        let known = if names.is_empty() { "none".into() } else { names.join(", ") };
        Error::new(ErrorKind::Config, "registry", format!("no backend is named {name:?}"))
            .with_context("registered", known)
            .with_remedy("choose a registered one, or build with the feature that brings it")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Never;

    #[async_trait]
    impl Opener for Never {
        async fn open(&self, _: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
            Err(Error::unsupported("open", "a test"))
        }
    }

    fn probe(_: &BackendConfig) -> Probe {
        Probe::Unavailable { reason: "a test".into(), remedy: None }
    }

    const fn entry(name: &'static str, about: &'static str) -> Registration {
        Registration { name, about, rank: None, probe, opener: &Never, apart: None }
    }

    static A: Registration = entry("a", "first");
    static B: Registration = entry("b", "second");
    static A_AGAIN: Registration = entry("a", "third");

    #[test]
    fn sorted_by_name() {
        let names: Vec<_> = sorted([&B, &A].into_iter()).unwrap();
        assert_eq!(names.iter().map(|r| r.name).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn a_name_taken_twice_is_an_error() {
        let error = sorted([&A, &B, &A_AGAIN].into_iter()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("\"a\""), "{error}");
    }

    #[test]
    fn an_unknown_name_lists_what_there_is() {
        let error = find("nope").unwrap_err();
        assert!(error.to_string().contains("registered=none"), "{error}");
    }
}
