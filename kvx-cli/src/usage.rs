//! What is said about a command line that makes no sense.

use std::ffi::OsString;
use std::io::{self, Write as _};

use kvx_core::config::number_in_words;
use serde_json::json;

use crate::output::{self, Output};
use crate::{failure, output_failed};

/// A range as people write it, not as a program does: `1 to 256`.
fn in_words(what: &str) -> String {
    let Some((start, range)) = what.rsplit_once(" is not in ") else {
        let split = what.rsplit_once(": ");
        let number = split.and_then(|(start, why)| Some((start, number_in_words(why)?)));
        return number.map_or_else(|| what.to_owned(), |(start, why)| format!("{start}: {why}"));
    };
    let start = start.rsplit_once(": ").map_or(start, |(start, _)| start);
    match range.split_once("..=").or_else(|| range.split_once("..")) {
        Some((low, "" | "18446744073709551615")) => format!("{start}: give {low} or more"),
        Some((low, high)) => format!("{start}: give {low} to {high}"),
        None => what.to_owned(),
    }
}

/// Prints what is wrong with the command line, or the help that was asked for.
pub(crate) fn refuse(error: &clap::Error, arguments: &[OsString]) -> u8 {
    if !error.use_stderr() {
        let mut out = io::stdout().lock();
        let written = write!(out, "{error}").and_then(|()| out.flush());
        return written.map_or_else(output_failed, |()| failure::OK);
    }
    let text = error.to_string();
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        output::note(text.trim_end());
        return failure::USAGE;
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut what = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    if error.kind() == clap::error::ErrorKind::MissingRequiredArgument {
        // They are in lines of their own.
        let missing = lines.clone().take_while(|line| line.starts_with(['-', '<']));
        what = format!("{what} {}", missing.collect::<Vec<_>>().join(", "));
    }
    let known = |line: &&str| line.starts_with("tip:") || line.starts_with("[possible values:");
    let command = ["demo", "plan", "bench", "serve", "key", "doctor", "top", "backends"]
        .into_iter()
        .find(|command| arguments.iter().skip(1).any(|argument| argument == command));
    let help = command
        .map_or_else(|| "see kvx --help".to_owned(), |name| format!("see kvx {name} --help"));
    let remedy = lines.find(known).unwrap_or(&help).trim_start_matches("tip: ");
    let what = in_words(&what);
    output::note(format!("error: {what}; {remedy}"));
    if arguments.iter().any(|argument| argument == "--json") {
        let document = json!({ "error": {
            "kind": "usage", "message": what, "remedy": remedy, "exit_code": failure::USAGE,
        } });
        let _unread = Output::new(true).document(&document);
    }
    failure::USAGE
}
