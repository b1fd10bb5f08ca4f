//! What the crates say of themselves while they work, on standard error: `KVX_LOG` says how much.

use std::io;
use std::str::FromStr as _;

use kvx_core::{Error, Result};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// What is named in the environment.
const VARIABLE: &str = "KVX_LOG";

/// Prints what is as bad as `least`, or what `KVX_LOG` asks for: `off`, `error`, `warn`, `info`, `debug` or `trace`, also by crate
/// (`warn,kvx_ucx=debug`).
///
/// # Errors
///
/// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): it is none of these.
pub(crate) fn begin(least: LevelFilter) -> Result<()> {
    let filter = match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => read(&text)?,
        _ => Targets::new().with_default(least),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false);
    // A program that has one already, as a test may, keeps it.
    let _kept = tracing_subscriber::registry().with(filter).with(lines).try_init();
    Ok(())
}

fn read(text: &str) -> Result<Targets> {
    Targets::from_str(text).map_err(|source| {
        Error::config(VARIABLE, format!("{text:?} says not how much to print"))
            .with_source(source)
            .with_remedy(
                "give off, error, warn, info, debug or trace; by crate: warn,kvx_ucx=debug",
            )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_also_by_crate() {
        for good in ["off", "error", "WARN", "info", "warn,kvx_ucx=debug", "kvx_shm=trace"] {
            read(good).unwrap();
        }
        for wrong in ["warn,kvx_ucx=loud", "=debug=1"] {
            let error = read(wrong).unwrap_err();
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("off, error")), "{error}");
        }
    }
}
