#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use kvx_core::registry::{self, Registration};
use kvx_core::{Error, Result};

pub mod control;
pub mod engine;
mod form;
pub mod integrity;
pub mod observe;
pub mod protocol;
pub mod rank;
pub mod scheduler;
mod select;
pub mod ticket;
pub mod worker;

pub use select::{
    Choice, ChoiceReason, Considered, Policy, Verdict, choose, choose_every, offers, open,
    open_every,
};

/// The built-in backends: one for each feature.
///
/// Naming the statics here is what makes the linker keep the backends' crates. Without it nothing refers to such a crate,
/// the linker drops it together with its registration, and the registry is empty without a word: measured with an optional
/// dependency alone, in a binary and in a `cdylib`, in debug and in release. A `use kvx_mock as _;` is not enough either: a
/// `staticlib` then still loses it.
pub static BUILTIN: &[&Registration] = &[
    #[cfg(feature = "mock")]
    &kvx_mock::REGISTRATION,
    #[cfg(feature = "shm")]
    &kvx_shm::REGISTRATION,
    #[cfg(feature = "ucx")]
    &kvx_ucx::REGISTRATION,
];

/// All backends of this program, sorted by name: those built in, and those of vendors.
///
/// # Errors
///
/// - [`ErrorKind::Config`](kvx_core::ErrorKind::Config): two have the same name.
/// - [`ErrorKind::Internal`](kvx_core::ErrorKind::Internal): one that is built in is not registered: the linker dropped
///   its registration.
pub fn backends() -> Result<Vec<&'static Registration>> {
    let all = registry::registered()?;
    let builtin = std::hint::black_box(BUILTIN);
    match builtin.iter().find(|builtin| !all.iter().any(|known| std::ptr::eq(*known, **builtin))) {
        None => Ok(all),
        Some(lost) => Err(Error::new(
            kvx_core::ErrorKind::Internal,
            "backends",
            format!("{:?} is built in but not registered", lost.name),
        )
        .with_remedy("link with the platform's default linker, and keep its .init_array sections")),
    }
}
