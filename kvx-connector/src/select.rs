//! Which backend to use, and why.
//!
//! A name that the program gives comes first, then `KVX_BACKEND`, then the highest rank among those that can be used here,
//! that the policy allows and that the other side has. A backend without a rank (the mock) is only ever taken by name.

use std::sync::Arc;

use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::{Apart, Probe, Registration};
use kvx_core::{Error, ErrorKind, Result};

mod choice;
mod policy;
#[cfg(test)]
mod tests;

pub use choice::{Choice, ChoiceReason, Considered, Verdict};
pub use policy::Policy;

/// Chooses among this program's backends. `peer` lists what the other side [`offers`]; `None` when that is not known.
///
/// Where both sides know each other's offers, both choose the same. The choice is logged.
///
/// # Errors
///
/// - [`ErrorKind::Config`]: no backend of this program has the name that was given, or there are options but no name, or
///   they are wrong.
/// - [`ErrorKind::Unsupported`]: the named backend cannot be used, with its probe's reason and remedy; or none can, with
///   what speaks against each.
/// - As for [`backends`](crate::backends).
pub fn choose(policy: &Policy, peer: Option<&[&str]>) -> Result<Choice> {
    let choice = choose_among(&crate::backends()?, policy, peer)?;
    tracing::info!(
        backend = choice.registration.name,
        reason = %choice.reason,
        detail = choice.detail,
        "chose a backend"
    );
    for considered in choice.considered.iter().filter(|c| c.verdict != Verdict::Chosen) {
        tracing::debug!(backend = considered.name, verdict = %considered.verdict, "did not choose");
    }
    Ok(choice)
}

/// What to tell the other side: the names of all backends that could be chosen here, sorted. One that reaches nobody outside of
/// a [place](kvx_core::capability::Capabilities::place) is followed by `@` and that.
///
/// # Errors
///
/// As for [`choose`], except that an empty list is no error.
pub fn offers(policy: &Policy) -> Result<Vec<String>> {
    offers_among(&crate::backends()?, policy)
}

/// Opens what was chosen. `config` is, most likely, the options of the policy by which it was.
///
/// # Errors
///
/// Those of the backend's [`Opener`](kvx_core::registry::Opener).
pub async fn open(choice: &Choice, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
    let name = choice.registration.name;
    let backend = choice.registration.opener.open(config).await.inspect_err(|error| {
        tracing::warn!(backend = name, %error, "could not open the chosen backend");
    })?;
    backend.capabilities().check().map_err(|error| error.with_backend(name))?;
    Ok(backend)
}

/// Chooses for a rank whose peers are not known yet: the backend that is named, by the policy or the environment; else all that can
/// be used here, those that reach one host only first, as the others take the memory that these allocate. Between two engines the best
/// that both have is then taken.
///
/// # Errors
///
/// As for [`choose`].
pub fn choose_every(policy: &Policy) -> Result<Vec<Choice>> {
    if policy.named().is_some() {
        return Ok(vec![choose(policy, None)?]);
    }
    let mut offers = offers(policy)?;
    offers.sort_by_key(|offer| !offer.contains('@'));
    let names = offers.iter().map(|offer| offer.split('@').next().unwrap_or(offer));
    let choices: Vec<Choice> = names
        .map(|name| choose(&policy.clone().with_name(Some(name)), None))
        .collect::<Result<_>>()?;
    match choices.is_empty() {
        // It says what speaks against each.
        true => Ok(vec![choose(policy, None)?]),
        false => Ok(choices),
    }
}

/// Opens what [`choose_every`] has chosen. One that cannot be opened is left out, as long as another can; why is logged.
///
/// # Errors
///
/// Those of the first that could not be opened, where none could.
pub async fn open_every(
    choices: &[Choice],
    config: &BackendConfig,
) -> Result<Vec<Arc<dyn TransferBackend>>> {
    let (mut backends, mut first) = (Vec::new(), None);
    for choice in choices {
        match open(choice, config).await {
            Ok(backend) => backends.push(backend),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if backends.is_empty() => Err(error),
        _ => Ok(backends),
    }
}

fn offers_among(all: &[&'static Registration], policy: &Policy) -> Result<Vec<String>> {
    if policy.named().is_some() {
        return Ok(match choose_among(all, policy, None) {
            Ok(choice) => {
                let place =
                    found(choice.registration, &policy.options, None).ok().and_then(|f| f.place);
                vec![offer(choice.registration.name, place)]
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => Vec::new(),
            Err(error) => return Err(error),
        });
    }
    check_options(policy)?;
    let found =
        all.iter().filter_map(|one| Some((one.name, usable(one, policy, None).ok()?.place)));
    let mut offers: Vec<_> = found.map(|(name, place)| offer(name, place)).collect();
    offers.sort_unstable();
    Ok(offers)
}

/// A backend that can be used here, for the other side.
fn offer(name: &str, place: Option<String>) -> String {
    match place {
        Some(place) => format!("{name}@{place}"),
        None => name.to_owned(),
    }
}

fn choose_among(
    all: &[&'static Registration],
    policy: &Policy,
    peer: Option<&[&str]>,
) -> Result<Choice> {
    let mut all = all.to_vec();
    all.sort_unstable_by_key(|one| one.name);
    match policy.named() {
        Some((name, reason)) => choose_named(&all, policy, peer, name, reason),
        None => choose_ranked(&all, policy, peer),
    }
}

fn choose_named(
    all: &[&'static Registration],
    policy: &Policy,
    peer: Option<&[&str]>,
    name: &str,
    reason: ChoiceReason,
) -> Result<Choice> {
    let Some(registration) = all.iter().find(|one| one.name == name).copied() else {
        return Err(named_by(
            Error::config("choose", format!("no backend is named {name:?}")),
            reason,
        )
        .with_context("registered", list(all.iter().map(|one| one.name)))
        .with_remedy(remedy_of_name(name, reason)));
    };
    match admit(registration, policy, peer)
        .and_then(|()| found(registration, &policy.options, peer))
    {
        Ok(Found { detail, .. }) => {
            let considered = all
                .iter()
                .map(|one| match one.name == name {
                    true => Considered { name: one.name, verdict: Verdict::Chosen },
                    false => Considered { name: one.name, verdict: Verdict::NotNamed },
                })
                .collect();
            Ok(Choice { registration, reason, detail, considered })
        }
        Err(verdict) => Err(refusal(registration.name, reason, verdict, policy, peer)),
    }
}

/// What to do about a name that no backend has.
fn remedy_of_name(name: &str, reason: ChoiceReason) -> String {
    match (name.split_once(','), reason) {
        (Some((name, options)), ChoiceReason::Environment)
            if options.chars().all(|char| char == ',' || char.is_whitespace()) =>
        {
            format!("drop the comma: {}={}", policy::NAME, name.trim())
        }
        (Some((name, options)), ChoiceReason::Environment) => {
            let (name, options) = (name.trim(), options.trim());
            format!(
                "options have a variable of their own: {}={name} {}={options}",
                policy::NAME,
                policy::OPTIONS
            )
        }
        (Some((name, _)), _) => format!("name it {:?}, and give its options apart", name.trim()),
        (None, _) => "name a registered one, or build with the feature that brings it".to_owned(),
    }
}

/// Says who named a backend, where that may not be known: a program knows what it named itself.
fn named_by(error: Error, reason: ChoiceReason) -> Error {
    match reason {
        ChoiceReason::Environment => error.with_context("named_by", policy::NAME),
        _ => error,
    }
}

/// Why the backend that was named is not taken.
fn refusal(
    name: &'static str,
    named: ChoiceReason,
    verdict: Verdict,
    policy: &Policy,
    peer: Option<&[&str]>,
) -> Error {
    // The error names the backend.
    let error =
        |message: String| named_by(Error::unsupported("choose", message).with_backend(name), named);
    let advised = |error: Error, remedy| match remedy {
        Some(remedy) => error.with_remedy(remedy),
        None => error,
    };
    match verdict {
        Verdict::Unavailable { reason, remedy } => {
            advised(error(format!("it cannot be used here: {reason}")), remedy)
        }
        Verdict::BadOptions { reason, remedy } => {
            let error = error(reason).with_kind(ErrorKind::Config);
            match policy.options.origin() {
                // Whoever reads this may know nothing of a variable that somebody else has set.
                Some(origin) => {
                    let remedy = remedy.map_or_else(String::new, |remedy| format!(": {remedy}"));
                    error
                        .with_context("options_from", origin)
                        .with_remedy(format!("mend the options in {origin}{remedy}"))
                }
                None => advised(error, remedy),
            }
        }
        Verdict::NotAllowed => error("it was asked for, but the policy forbids it".into())
            .with_context("allowed", list(policy.allow.iter().flatten()))
            .with_remedy("allow it, or name another"),
        Verdict::PeerElsewhere { here, there, why, remedy } => {
            let why = why.unwrap_or_else(|| "the peer is at another place".into());
            let remedy = remedy.unwrap_or_else(|| "name a backend that reaches other hosts".into());
            error(format!("it was asked for, but {why}"))
                .with_context("here", here)
                .with_context("there", there)
                .with_remedy(remedy)
        }
        _ => error("it was asked for, but the peer does not have it".into())
            .with_context("peer", list(peer.unwrap_or_default()))
            .with_remedy("start the peer with this backend, or name one that it has"),
    }
}

fn choose_ranked(
    all: &[&'static Registration],
    policy: &Policy,
    peer: Option<&[&str]>,
) -> Result<Choice> {
    check_options(policy)?;
    let judged: Vec<_> = all.iter().map(|one| (*one, usable(one, policy, peer))).collect();
    let usable = || judged.iter().filter_map(|(one, found)| Some((*one, found.as_ref().ok()?)));
    // Sorted by name, and the first of equals is kept: names decide between equal ranks.
    let best = usable().reduce(|best, next| if next.1.rank > best.1.rank { next } else { best });
    let Some((registration, found)) = best else { return Err(none_usable(judged)) };
    let reason = if usable().count() == 1 { ChoiceReason::Only } else { ChoiceReason::Ranked };
    let detail = found.detail.clone();
    let considered = judged
        .into_iter()
        .map(|(one, found)| {
            let verdict = match found {
                Ok(_) if one.name == registration.name => Verdict::Chosen,
                Ok(Usable { rank, .. }) => Verdict::Outranked { rank },
                Err(verdict) => verdict,
            };
            Considered { name: one.name, verdict }
        })
        .collect();
    Ok(Choice { registration, reason, detail, considered })
}

/// A backend that may be chosen unasked.
struct Usable {
    rank: u32,
    detail: String,
    place: Option<String>,
}

/// Whether a backend may be chosen unasked.
fn usable(one: &Registration, policy: &Policy, peer: Option<&[&str]>) -> Result<Usable, Verdict> {
    admit(one, policy, peer)?;
    let rank = one.rank.ok_or(Verdict::NeverUnasked)?;
    let Found { detail, place } = found(one, &BackendConfig::new(), peer)?;
    Ok(Usable { rank, detail, place })
}

/// Whether a backend may be chosen at all.
fn admit(one: &Registration, policy: &Policy, peer: Option<&[&str]>) -> Result<(), Verdict> {
    if !policy.allows(one.name) {
        return Err(Verdict::NotAllowed);
    }
    if peer.is_some_and(|offers| offers.iter().all(|offer| name_and_place(offer).0 != one.name)) {
        return Err(Verdict::PeerLacksIt);
    }
    Ok(())
}

fn name_and_place(offer: &str) -> (&str, Option<&str>) {
    offer.split_once('@').map_or((offer, None), |(name, place)| (name, Some(place)))
}

/// Whether it reaches the other side, as far as both say where they are.
fn meets(one: &Registration, here: Option<&str>, peer: Option<&[&str]>) -> Result<(), Verdict> {
    let mut offers = peer.unwrap_or_default().iter().map(|offer| name_and_place(offer));
    let there = offers.find(|(offered, _)| *offered == one.name).and_then(|(_, there)| there);
    match (here, there) {
        (Some(here), Some(there)) if here != there => {
            let apart = one.apart.and_then(|apart| apart(here, there));
            let (why, remedy) = apart.map(|Apart { why, remedy }| (why, remedy)).unzip();
            let (here, there) = (here.to_owned(), there.to_owned());
            Err(Verdict::PeerElsewhere { here, there, why, remedy })
        }
        _ => Ok(()),
    }
}

/// What one probe told: they may load libraries, so each is asked once.
struct Found {
    detail: String,
    place: Option<String>,
}

/// Whether a backend can be used here, and for the other side.
fn found(
    one: &Registration,
    options: &BackendConfig,
    peer: Option<&[&str]>,
) -> Result<Found, Verdict> {
    match (one.probe)(options) {
        Probe::Available { detail, capabilities } => {
            let place = capabilities.place;
            meets(one, place.as_deref(), peer)?;
            Ok(Found { detail, place })
        }
        Probe::Unavailable { reason, remedy } => Err(Verdict::Unavailable { reason, remedy }),
        Probe::BadOptions { reason, remedy } => Err(Verdict::BadOptions { reason, remedy }),
        _ => Err(Verdict::Unavailable { reason: "its probe is inconclusive".into(), remedy: None }),
    }
}

fn check_options(policy: &Policy) -> Result<()> {
    if policy.options == BackendConfig::new() {
        return Ok(());
    }
    Err(Error::config("choose", "there are options for a backend, but none is named")
        .with_remedy(format!("name one, for example with {}, or drop the options", policy::NAME)))
}

/// Why no backend is taken.
fn none_usable(
    judged: Vec<(&'static Registration, std::result::Result<Usable, Verdict>)>,
) -> Error {
    let unasked = judged.iter().any(|(_, found)| matches!(found, Err(Verdict::NeverUnasked)));
    let together = judged.iter().find_map(|(_, found)| match found {
        Err(Verdict::PeerElsewhere { remedy, .. }) => remedy.clone(),
        _ => None,
    });
    let remedy = if judged.is_empty() {
        "build with the feature of a backend".to_owned()
    } else if let Some(together) = together {
        // That one is available, on both sides.
        format!("{together}: kvx backends says what the others lack")
    } else if unasked {
        "name a backend, for example with KVX_BACKEND, or make another one available: kvx backends"
            .to_owned()
    } else {
        "make one of them available: kvx backends".to_owned()
    };
    let error = Error::unsupported("choose", "no backend can be used").with_remedy(remedy);
    judged
        .into_iter()
        .filter_map(|(one, found)| Some((one.name, found.err()?)))
        .fold(error, |error, (name, verdict)| error.with_context(name, verdict))
}

/// Names, as a message lists them.
fn list(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<_> = names.into_iter().map(|name| name.as_ref().to_owned()).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
