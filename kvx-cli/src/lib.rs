#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod args;
mod backends;
mod bench;
mod demo;
mod doctor;
mod engine;
mod fabric;
mod failure;
mod help;
mod key;
mod log;
mod memory;
pub mod metrics;
mod model;
mod options;
mod output;
mod pairs;
mod picture;
mod plan;
mod remarks;
mod remote;
mod serve;
mod shape;
mod size;
mod tables;
mod top;
pub mod trace;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use tracing_subscriber::filter::LevelFilter;

use args::{Cli, Command};
use failure::Failure;
use output::Output;

/// Runs the program with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    ExitCode::from(match Cli::try_parse_from(&arguments) {
        Ok(cli) => run(&cli),
        Err(error) => usage(&error, &arguments),
    })
}

fn run(cli: &Cli) -> u8 {
    let mut out = Output::new(cli.json);
    let least = match cli.command {
        // It runs for long, and nobody else tells how its peers fare.
        Command::Serve(_) => LevelFilter::WARN,
        _ => LevelFilter::ERROR,
    };
    let done = log::begin(least).map_err(Failure::from).and_then(|()| execute(cli, &mut out));
    match done {
        Ok(code) => code,
        Err(Failure::Error(error)) => {
            let error = remote::because(error);
            output::note(format!("error: {}", failure::line(&error)));
            // The exit code tells of the error in any case.
            let _unread = out.document(&failure::document(&error));
            failure::exit_code(&error)
        }
        Err(Failure::Output(error)) => output_failed(error),
    }
}

fn execute(cli: &Cli, out: &mut Output) -> Result<u8, Failure> {
    match &cli.command {
        Command::Backends(args) => backends::run(args, out).map(|()| failure::OK),
        Command::Demo(args) => demo::run(args, out),
        Command::Bench(args) => bench::run(args, out),
        Command::Guard { group } => {
            bench::guard(*group).map(|()| failure::OK).map_err(Failure::from)
        }
        Command::Engine => remote::serve().map(|()| failure::OK).map_err(Failure::from),
        Command::Serve(args) => serve::run(args, out),
        Command::Doctor(args) => doctor::run(args, out),
        Command::Key(args) => key::run(args, out).map(|()| failure::OK),
        Command::Top(args) => top::run(args, out),
        Command::Plan(args) => plan::run(args, out).map(|()| failure::OK),
    }
}

/// Says that standard output cannot be written; gives the exit code.
fn output_failed(error: io::Error) -> u8 {
    // Whoever read the output has seen enough.
    if error.kind() == io::ErrorKind::BrokenPipe {
        return failure::OK;
    }
    output::note(format!("error: standard output cannot be written: {error}"));
    failure::FAILED
}

/// A range as people write it, not as a program does: `1 to 256`.
fn in_words(what: &str) -> String {
    let Some((start, range)) = what.rsplit_once(" is not in ") else { return what.to_owned() };
    let start = start.rsplit_once(": ").map_or(start, |(start, _)| start);
    match range.split_once("..=").or_else(|| range.split_once("..")) {
        Some((low, "" | "18446744073709551615")) => format!("{start}: give {low} or more"),
        Some((low, high)) => format!("{start}: give {low} to {high}"),
        None => what.to_owned(),
    }
}

/// Prints what is wrong with the command line, or the help that was asked for.
fn usage(error: &clap::Error, arguments: &[OsString]) -> u8 {
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
