//! Numbers as people read and write them.

const UNITS: [(&str, u32); 5] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40)];

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

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
