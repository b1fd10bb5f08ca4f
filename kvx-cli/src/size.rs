//! Numbers as people read and write them.

use kvx_core::{Error, Result};

const UNITS: [(&str, u32); 5] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40)];

/// Reads a number of bytes: `4096`, `512M`, `8G`, `8GiB`. Units are powers of 1,024.
///
/// # Errors
///
/// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), naming `option`, when it is not such a number, is zero, or is too large.
pub(crate) fn parse(option: &'static str, text: &str) -> Result<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.trim_end_matches('B').trim_end_matches('I');
    let shift = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, shift)| *shift);
    let number = digits.parse::<u64>().ok().filter(|number| *number > 0);
    number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift)).ok_or_else(|| {
        Error::config(option, format!("{text:?} is not a number of bytes"))
            .with_remedy("write, for example, 512M or 8G")
    })
}

/// A number of bytes, in the unit that gives one to four digits: `64.0 MiB`.
#[must_use]
pub(crate) fn bytes(bytes: u64) -> String {
    let (name, shift) = UNITS.iter().rev().find(|(_, s)| bytes >> s > 0).unwrap_or(&UNITS[0]);
    let unit = 1_u64 << shift;
    let (whole, rest) = (bytes / unit, bytes % unit);
    match *shift {
        0 => format!("{whole} B"),
        _ if rest == 0 && whole < 1024 => format!("{whole} {name}iB"),
        _ => format!("{whole}.{} {name}iB", u128::from(rest) * 10 / u128::from(unit)),
    }
}

/// A number with its thousands set apart: `262,144`.
#[must_use]
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How many of something: `1 round`, `1,000 rounds`.
pub(crate) fn of_many(number: u64, of: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {of}{plural}", count(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, size) in [
            ("1", 1),
            ("4096", 4096),
            ("2K", 2048),
            ("3m", 3 << 20),
            ("8G", 8 << 30),
            ("8GiB", 8 << 30),
            ("8 GB", 8 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse("--memory", text).unwrap(), size, "{text}");
        }
        for text in ["", "0", "G", "-1", "1.5G", "4X", "99999999999999T", "1 000", "é"] {
            let error = parse("--memory", text).unwrap_err().to_string();
            assert!(error.starts_with("--memory: "), "{error}");
        }
    }

    #[test]
    fn sizes_are_written() {
        for (size, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            ((8 << 30) + (512 << 20), "8.5 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(bytes(size), text);
        }
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (262_144, "262,144"),
            (1 << 30, "1,073,741,824"),
        ] {
            assert_eq!(count(number), text);
        }
        for (number, text) in [(0, "0 rounds"), (1, "1 round"), (1000, "1,000 rounds")] {
            assert_eq!(of_many(number, "round"), text);
        }
    }
}
