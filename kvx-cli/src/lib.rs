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
mod file;
mod group;
mod help;
mod host;
mod key;
mod log;
mod memory;
pub mod metrics;
mod model;
mod options;
mod output;
mod own;
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
mod usage;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::Parser;
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
        Err(error) => usage::refuse(&error, &arguments),
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
pub(crate) fn output_failed(error: io::Error) -> u8 {
    // Whoever read the output has seen enough.
    if error.kind() == io::ErrorKind::BrokenPipe {
        return failure::OK;
    }
    let remedy = match error.kind() {
        io::ErrorKind::FileTooLarge => "; let this process write larger files: ulimit -f",
        _ => "",
    };
    output::note(format!("error: standard output cannot be written: {error}{remedy}"));
    failure::FAILED
}
