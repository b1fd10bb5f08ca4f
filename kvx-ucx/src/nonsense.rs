//! Values of UCX's settings that it takes, and with which nothing is ever moved, or the process ends: as options and as variables.

use kvx_core::{Error, Result};

use crate::error::BACKEND;

/// Settings that count, by the ends of their names, and the most that they may be. With 0 transports do nothing in a round of
/// progress, and the system refuses what TCP asks it for: UCX then tries for ever.
const COUNTS: &[(&str, u64)] = &[
    ("_MAX_POLL", u64::MAX),
    ("_TX_QUOTA", u64::MAX),
    ("CMA_SEG_SIZE", u64::MAX),
    ("TCP_MAX_CONN_RETRIES", u64::MAX),
    // The system takes no more.
    ("TCP_SYN_CNT", 127),
    ("TCP_KEEPCNT", 127),
    // It is divided by.
    ("NUM_PPN", u64::MAX),
];

/// What it looks for among its protocols; where it finds none it looks no further than at a null pointer.
const PROTOCOLS: &str = "PROTOS";

/// Looks at a setting by its name without `UCX_`, which comes behind `prefix` where it was said.
pub(crate) fn check(operation: &'static str, prefix: &str, name: &str, value: &str) -> Result<()> {
    let refuse = |why: &str, remedy: String| {
        let error = Error::config(operation, format!("{prefix}{name}={value}: {why}"));
        Err(error.with_backend(BACKEND).with_remedy(remedy))
    };
    if name == PROTOCOLS && !value.trim().eq_ignore_ascii_case("all") {
        return refuse("kvx needs all of UCX's protocols", "leave it out".to_owned());
    }
    let Some((_, most)) = COUNTS.iter().find(|(end, _)| name.ends_with(end)) else { return Ok(()) };
    match leading(value) {
        Some(number) if !(1..=*most).contains(&number) => {
            let to = if *most == u64::MAX { "or more".to_owned() } else { format!("to {most}") };
            refuse("UCX takes it, and then moves nothing", format!("write 1 {to}, or leave it out"))
        }
        _ => Ok(()),
    }
}

/// The digits that a value begins with, as a number.
fn leading(value: &str) -> Option<u64> {
    let value = value.trim_start();
    let value = value.strip_prefix('+').unwrap_or(value);
    let digits = value.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then(|| value[..digits].parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn what_would_move_nothing_is_refused_wherever_it_is_said() {
        let said = |name, value| check("options", "ucx.", name, value);
        for (name, value) in [
            ("CMA_TX_QUOTA", "0"),
            ("KNEM_TX_QUOTA", " +0"),
            ("TCP_MAX_POLL", "0"),
            ("SYSV_FIFO_MAX_POLL", "00"),
            ("CMA_SEG_SIZE", "0k"),
            ("TCP_SYN_CNT", "0"),
            ("TCP_SYN_CNT", "128"),
            ("TCP_KEEPCNT", "99999999999999999999999"),
            ("NUM_PPN", "0"),
            ("PROTOS", "junk"),
        ] {
            let error = said(name, value).unwrap_err().to_string();
            assert!(error.starts_with(&format!("options: ucx.{name}={value}: ")), "{error}");
        }
        for (name, value) in [
            ("CMA_TX_QUOTA", "8"),
            ("TCP_MAX_POLL", "inf"),
            ("TCP_SYN_CNT", "auto"),
            ("TCP_SYN_CNT", "127"),
            ("TCP_TX_SEG_SIZE", "0"),
            ("MAX_RMA_RAILS", "0"),
            ("PROTOS", "all"),
        ] {
            assert!(said(name, value).is_ok(), "{name}={value}");
        }
    }
}
