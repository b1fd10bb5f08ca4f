//! `kvx backends`: what this program can move data with.

use kvx_connector::{Policy, choose};
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;
use kvx_core::{Error, ErrorKind};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::BackendsArgs;
use crate::failure::{self, Failure};
use crate::options::{self, BackendOption};
use crate::output::{self, Output};
use crate::size;

/// A backend, as `kvx backends --json` prints it.
#[derive(Debug, Serialize)]
struct Entry {
    name: &'static str,
    about: &'static str,
    /// How good a choice it is unasked: higher is better, `null` is never chosen unasked.
    rank: Option<u32>,
    /// Whether it can be used, and what was found; or why not, and what to install.
    #[serde(flatten)]
    probe: Probe,
    /// Its options, where they were asked for and are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    options: Option<Vec<BackendOption>>,
}

/// Runs `kvx backends`.
pub(crate) fn run(args: &BackendsArgs, out: &mut Output) -> Result<(), Failure> {
    let all = kvx_connector::backends()?;
    if let Some(name) = &args.name
        && !all.iter().any(|registration| registration.name == name)
    {
        let names: Vec<&str> = all.iter().map(|registration| registration.name).collect();
        return Err(Error::config("backends", format!("no backend {name} is built in"))
            .with_remedy(format!("name one of {}", names.join(", ")))
            .into());
    }
    let is_meant = |name: &str| args.name.as_ref().is_none_or(|wanted| wanted == name);
    let entries: Vec<Entry> = all
        .into_iter()
        .filter(|registration| is_meant(registration.name))
        .map(|registration| Entry {
            name: registration.name,
            about: registration.about,
            rank: registration.rank,
            probe: (registration.probe)(&BackendConfig::new()),
            options: (args.options || args.name.is_some()).then(|| options::of(registration)),
        })
        .collect();
    let choice = Policy::from_env().and_then(|policy| choose(&policy, None));
    let chosen: Value = match &choice {
        Ok(choice) => json!(choice),
        Err(error) => failure::document(error),
    };
    out.document(&json!({ "backends": entries, "choice": chosen }))?;
    print(&entries, choice.as_ref().map(ToString::to_string), out)?;
    Ok(())
}

fn print(
    entries: &[Entry],
    choice: Result<String, &Error>,
    out: &mut Output,
) -> std::io::Result<()> {
    if entries.is_empty() {
        out.line("no backend is built in; build with the feature of one, for example mock")?;
    } else {
        let mut table = output::wrapped(&["backend", "state", "what was found"]);
        for entry in entries {
            let (state, found) = match &entry.probe {
                Probe::Available { detail, .. } => ("available", detail.clone()),
                Probe::Unavailable { reason, remedy } => {
                    let remedy = remedy.as_deref().map(|remedy| format!("; {remedy}"));
                    ("unavailable", reason.clone() + &remedy.unwrap_or_default())
                }
                Probe::BadOptions { reason, .. } => ("wrong options", reason.clone()),
                _ => ("unknown", String::new()),
            };
            table.add_row([entry.name.to_owned(), state.to_owned(), found]);
        }
        out.table(&table)?;
    }
    for entry in entries {
        out.line("")?;
        out.line(format!("{}: {}", entry.name, entry.about))?;
        if let Probe::Available { capabilities, .. } = &entry.probe {
            for line in lines(capabilities) {
                out.line(format!("  {line}"))?;
            }
        }
        if let Some(options) = &entry.options {
            let mut table = output::wrapped(&["option", "default", "what it does"]);
            for option in options {
                table.add_row([&*option.name, option.default, option.about]);
            }
            out.line("")?;
            out.table(&table)?;
        }
    }
    if entries.iter().any(|entry| entry.options.is_none()) {
        out.line("")?;
        out.line("kvx backends NAME, or --options: the options of one, or of all")?;
    }
    out.line("")?;
    match choice {
        Ok(choice) => out.line(format!("kvx demo uses {choice}")),
        Err(error) if error.kind() != ErrorKind::Unsupported => {
            out.line(format!("kvx demo can use none: {}", failure::line(error)))
        }
        Err(_) if entries.iter().any(|entry| entry.name == "mock") => {
            out.line("no fabric can be used here; kvx demo uses the mock")
        }
        Err(_) => out.line("no fabric can be used here"),
    }
}

/// Capabilities in words, one line for each sort.
fn lines(capabilities: &Capabilities) -> Vec<String> {
    let named = |all: &[(bool, &str)]| {
        let names: Vec<&str> = all.iter().filter(|(has, _)| *has).map(|(_, name)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let limits = &capabilities.limits;
    let order = match capabilities.ordering {
        Ordering::PerPeer => "in the order posted, per peer",
        _ => "in any order",
    };
    let revoke = match capabilities.revoke {
        Revoke::PerPeer => "per peer",
        Revoke::PerRegion => "per region",
        _ => "not possible",
    };
    vec![
        format!(
            "modes      {}",
            named(&[(capabilities.read, "read"), (capabilities.write, "write")])
        ),
        format!(
            "memory     {}",
            named(&[(capabilities.host_memory, "host"), (capabilities.cuda_memory, "CUDA")])
        ),
        format!(
            "limits     segment {}, batch {} segments, notification {}, {} batches in flight",
            size::bytes(limits.max_segment_bytes),
            size::count(limits.max_batch_segments.into()),
            size::bytes(limits.max_notification_bytes.into()),
            size::count(limits.max_in_flight.into()),
        ),
        format!("ordering   {order}"),
        format!("revoking   {revoke}"),
        format!(
            "extras     {}",
            named(&[
                (capabilities.native_notification, "native notification"),
                (capabilities.event_fd, "event descriptor"),
            ])
        ),
    ]
}
