//! `kvx doctor`: what of this host kvx depends on, and what to do where it is not as it should be.

mod control;
mod rdma;
mod system;

use std::path::Path;

use kvx_connector::{Policy, Verdict};
use kvx_core::Error;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;
use serde::Serialize;
use serde_json::json;

use crate::args::DoctorArgs;
use crate::failure::{self, Failure};
use crate::host::Host;
use crate::output::{self, Output};
use crate::size;

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// As it should be.
    Ok,
    /// kvx works, and something will be slow, or will not work under some load or for some peers.
    Warning,
    /// Something that was asked for, or that is there, cannot be used.
    Failure,
}

/// What was looked at, and how it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    check: &'static str,
    state: State,
    found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Ok, found: found.into(), remedy: None }
    }

    fn warning(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Warning, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn failure(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Failure, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// Runs `kvx doctor`; gives the exit code: 1 where there is a failure.
///
/// # Errors
///
/// Standard output cannot be written.
pub(crate) fn run(args: &DoctorArgs, out: &mut Output) -> Result<u8, Failure> {
    let host = Host::new(args.root.as_deref().unwrap_or_else(|| Path::new("/")));
    let mut findings = system::look(&host);
    findings.extend(rdma::look(&host));
    if args.root.is_none() {
        findings.extend(backends()?);
        findings.extend(control::look(args));
    }
    let of = |state| findings.iter().filter(|finding| finding.state == state).count();
    let (warnings, failures) = (of(State::Warning), of(State::Failure));
    out.document(&json!({
        "checks": findings, "warnings": warnings, "failures": failures,
    }))?;
    print(&findings, (warnings, failures), out)?;
    Ok(if failures == 0 { failure::OK } else { failure::FAILED })
}

fn print(
    findings: &[Finding],
    (warnings, failures): (usize, usize),
    out: &mut Output,
) -> std::io::Result<()> {
    let mut table = output::wrapped(&["check", "state", "what was found"]);
    for finding in findings {
        let state = match finding.state {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Failure => "FAILURE",
        };
        let remedy = finding.remedy.as_ref().map(|remedy| format!("; {remedy}"));
        let found = format!("{}{}", finding.found, remedy.unwrap_or_default());
        table.add_row([finding.check.to_owned(), state.to_owned(), found]);
    }
    out.table(&table)?;
    out.line("")?;
    out.line(format!(
        "{}, {}",
        size::of_many(warnings as u64, "warning"),
        size::of_many(failures as u64, "failure"),
    ))
}

/// What the backends' own probes say: that of the one that the environment names, with its options, or of all.
fn backends() -> Result<Vec<Finding>, Failure> {
    Ok(match Policy::from_env() {
        Ok(policy) if policy.environment.is_some() => vec![named(&policy)],
        Ok(_) => all()?,
        // Nothing that reads it would run.
        Err(error) => vec![refused(&error)],
    })
}

/// The backend that `KVX_BACKEND` names: every command uses it that is not given another.
fn named(policy: &Policy) -> Finding {
    match kvx_connector::choose(policy, None) {
        Ok(choice) => {
            let others = choice.considered.iter().filter(|one| one.verdict == Verdict::NotNamed);
            let others: Vec<&str> = others.map(|other| other.name).collect();
            let (name, detail) = (choice.registration.name, &choice.detail);
            let unused = match others.is_empty() {
                true => String::new(),
                false => format!("; not used: {}", others.join(", ")),
            };
            Finding::ok("backend", format!("{name}, {}: {detail}{unused}", choice.reason))
        }
        Err(error) => refused(&error),
    }
}

fn refused(error: &Error) -> Finding {
    let facts = error.context().iter().map(|(name, value)| format!("{name}={value}"));
    let facts: Vec<String> = facts.collect();
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    let name = error.backend().map_or_else(String::new, |name| format!("{name}: "));
    let remedy = error.remedy().unwrap_or("see kvx backends, or unset KVX_BACKEND");
    Finding::failure("backend", format!("{name}{}{facts}", error.message()), remedy)
}

/// What can be used where none is named.
fn all() -> Result<Vec<Finding>, Failure> {
    let mut findings = Vec::new();
    let mut usable = Vec::new();
    for registration in kvx_connector::backends()? {
        // The mock moves nothing between processes.
        if registration.rank.is_none() {
            continue;
        }
        let found = |text: &str| format!("{}: {text}", registration.name);
        findings.push(match (registration.probe)(&BackendConfig::new()) {
            Probe::Available { detail, .. } => {
                usable.push(registration.name);
                Finding::ok("backend", found(&detail))
            }
            Probe::Unavailable { reason, remedy } | Probe::BadOptions { reason, remedy } => {
                let remedy = remedy.unwrap_or_else(|| "see kvx backends".to_owned());
                Finding::warning("backend", found(&reason), remedy)
            }
            _ => Finding::warning("backend", found("its state is not known"), "see kvx backends"),
        });
    }
    if usable.is_empty() {
        findings.push(Finding::failure(
            "backend",
            "no backend can move caches between processes here",
            "do what is said of one of them, or build kvx with the feature of another",
        ));
    } else if usable == ["shm"] {
        findings.push(Finding::warning(
            "backend",
            "only shm can be used: engines on other hosts cannot be reached",
            "install UCX (docs/ucx.md), if there are any",
        ));
    }
    Ok(findings)
}
