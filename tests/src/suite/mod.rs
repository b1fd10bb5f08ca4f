//! The conformance kit: holds a backend to the contract, clause by clause.
//!
//! A backend's crate has one file, `tests/conformance.rs`, with `harness = false` in its `Cargo.toml`:
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvx_core::backend::TransferBackend;
//! use kvx_tests::suite::{Ground, Setup, Stage, Subject};
//!
//! struct Mine;
//!
//! impl Subject for Mine {
//!     fn name(&self) -> &'static str {
//!         "mine"
//!     }
//!
//!     fn setups(&self) -> Vec<Setup> {
//!         vec![Setup::new("tcp")]
//!     }
//!
//!     fn stage(&self, ground: &Ground) -> kvx_core::Result<Box<dyn Stage>> {
//!         Ok(Box::new(Over(ground.setup.clone())))
//!     }
//! }
//!
//! struct Over(String);
//!
//! impl Stage for Over {
//!     fn open(&self, side: &str) -> kvx_core::Result<Arc<dyn TransferBackend>> {
//!         // Open the backend as the setup says.
//!         # let _ = side;
//!         # Err(kvx_core::Error::unsupported("open", "an example"))
//!     }
//! }
//!
//! kvx_tests::conformance!(Mine);
//! ```
//!
//! Every clause is a test of its own for each setup and each [`Place`]: `tcp::two_processes::data.read.exact`, say. A clause
//! that a backend's [capabilities](kvx_core::capability::Capabilities) do not reach is *ignored*, with the reason. What cannot
//! be tested here is ignored, too, unless the environment variable `KVX_REQUIRE` (names, with commas between) has the
//! backend's name (`-` and `_` are alike): then it is a failure. What a clause failed with names its seed; `KVX_SEED` runs that seed alone.
//!
//! Every wait has an end: a backend that hangs fails the clause, by name, and does not hang the kit.
//!
//! For every clause there are *saboteurs*: backends with one deliberate fault each, on which the clause must fail. A clause
//! without one does not compile. `docs/conformance.md` lists both.

mod arena;
mod clause;
mod clauses;
mod command;
mod dice;
mod host;
mod lane;
mod ledger;
mod namespace;
mod page;
mod peer;
mod run;
mod side;
mod subject;
mod watch;
mod world;

pub use clause::{Clause, Point};
pub use page::page;
pub use run::{applies, check, clauses, run, seed};
pub use subject::{Fault, Ground, Place, Setup, Stage, Subject};

/// The `main` of a conformance test: runs every clause on a [`Subject`](crate::suite::Subject), given as an expression that
/// can be a constant.
#[macro_export]
macro_rules! conformance {
    ($subject:expr $(,)?) => {
        fn main() -> ::std::process::ExitCode {
            static SUBJECT: &dyn $crate::suite::Subject = &$subject;
            $crate::suite::run(SUBJECT)
        }
    };
}
