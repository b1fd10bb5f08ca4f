//! Reading a trace.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use kvx_core::{Error, Result};

use super::Entry;

/// Most bytes of a line.
const MAX_LINE: u64 = 4 << 20;

/// The first `limit` requests of the trace in a file.
///
/// # Errors
///
/// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): the file cannot be read, has no request, or has a line that is none; that
/// line's number and what is wrong with it are given.
pub fn read(path: &Path, limit: usize) -> Result<Vec<Entry>> {
    let name = path.display();
    let file = File::open(path).map_err(|source| {
        Error::config("--trace", format!("{name} cannot be opened")).with_source(source)
    })?;
    parse(BufReader::new(file), limit).map_err(|error| error.with_context("file", name))
}

/// The first `limit` requests of a trace: JSON lines. Empty lines are passed over.
///
/// # Errors
///
/// As for [`read`].
pub fn parse(mut lines: impl BufRead, limit: usize) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut line = Vec::new();
    let mut number = 0_u64;
    while entries.len() < limit {
        line.clear();
        number += 1;
        let refuse = |why: String| Error::config("--trace", format!("line {number}: {why}"));
        let bytes = lines
            .by_ref()
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .map_err(|source| refuse("cannot be read".into()).with_source(source))?;
        if bytes == 0 {
            break;
        }
        if bytes as u64 == MAX_LINE && line.last() != Some(&b'\n') {
            return Err(refuse(format!("longer than {MAX_LINE} bytes")));
        }
        let text = line.trim_ascii();
        if text.is_empty() {
            continue;
        }
        if !text.starts_with(b"{") {
            return Err(refuse("expected a JSON object".into()));
        }
        let entry: Entry = serde_json::from_slice(text).map_err(|error| {
            refuse(reason(&error)).with_remedy(
                "a line is {\"timestamp\": ms, \"input_length\": n, \"output_length\": n, \"hash_ids\": [...]}",
            )
        })?;
        match entry.fault() {
            None => entries.push(entry),
            Some(fault) => return Err(refuse(fault)),
        }
    }
    if entries.is_empty() {
        return Err(Error::config("--trace", "there is no request in it"));
    }
    Ok(entries)
}

/// What is wrong with a line, and in which column: which line it is, a parser of that line alone cannot know.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&place) {
        Some(what) => format!("{what} in column {}", error.column()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}"#;

    #[test]
    fn lines_are_read_up_to_the_limit() {
        let text = format!("{GOOD}\n\n  {GOOD}  \r\n{GOOD}");
        let all = parse(text.as_bytes(), 10).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(
            all[2],
            Entry { timestamp: 5, input_length: 600, output_length: 7, hash_ids: vec![1, 2] }
        );
        // What comes after the limit is not looked at.
        assert_eq!(parse(format!("{GOOD}\nnonsense").as_bytes(), 1).unwrap().len(), 1);
    }

    #[test]
    fn unknown_fields_are_passed_over() {
        let text = GOOD.replace('}', r#", "type": "chat"}"#);
        assert_eq!(parse(text.as_bytes(), 9).unwrap().len(), 1);
    }

    #[test]
    fn a_bad_line_is_named_with_the_reason() {
        for (bad, why) in [
            ("nonsense", "expected"),
            ("{}", "missing field `timestamp`"),
            (&GOOD.replace("600", "-1"), "invalid value"),
            (&GOOD.replace("600", "1.5"), "invalid type"),
            (&GOOD.replace("600", "0"), "input_length is 0"),
            (&GOOD.replace("600", "99999999999"), "it must be 1 to 16777216"),
            (&GOOD.replace("600", "1025"), "2 hash_ids; 1025 tokens need 3, one for each 512"),
            (&GOOD.replace("600", "512"), "2 hash_ids; 512 tokens need 1,"),
            (&GOOD.replace("[1, 2]", "[1, -2]"), "invalid value"),
            ("{\"timestamp\": 5", "EOF"),
            ("[0, 600, 5, [1, 2]]", "expected a JSON object"),
            ("\u{0}", "expected a JSON object"),
        ] {
            let text = format!("{GOOD}\n\n{bad}\n{GOOD}\n");
            let error = parse(text.as_bytes(), 10).unwrap_err();
            assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
            let error = error.to_string();
            assert!(error.contains("line 3: ") && error.contains(why), "{bad:?}: {error}");
            assert_eq!(
                error.matches("line ").count(),
                1 + usize::from(error.contains("a line is")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let endless = BufReader::new(std::io::repeat(b'7'));
        let error = parse(endless, 1).unwrap_err().to_string();
        assert!(error.contains("line 1: longer than"), "{error}");
    }

    #[test]
    fn an_empty_trace_is_refused() {
        assert!(parse(&b"\n\n"[..], 5).unwrap_err().to_string().contains("no request"));
        assert!(read(Path::new("/no/such/trace"), 5).unwrap_err().to_string().contains("/no/such"));
    }
}
