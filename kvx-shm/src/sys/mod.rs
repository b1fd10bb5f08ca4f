//! All that is unsafe: mappings, copies, and the system calls for which there is no safe wrapper.

mod backing;
pub(crate) mod copy;
pub mod limit;
pub(crate) mod memfd;
pub(crate) mod numa;
pub(crate) mod page;
pub(crate) mod runs;
pub(crate) mod socket;
pub(crate) mod vm;
