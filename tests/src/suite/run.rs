//! From clauses, setups and places to tests.

use std::any::Any;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use super::clause::{Breach, Claims, Clause, Verdict};
use super::clauses::GROUPS;
use super::peer::serve_if_asked;
use super::subject::{Ground, Place, Setup, Subject};
use super::watch::Watch;
use super::world::World;

/// All clauses, in the order of the page.
pub fn clauses() -> impl Iterator<Item = &'static Clause> {
    GROUPS.iter().flat_map(|group| group.clauses)
}

/// Runs the kit, as a test's `main` does.
pub fn run(subject: &'static dyn Subject) -> ExitCode {
    if let Some(code) = serve_if_asked(subject) {
        return code;
    }
    let seed = match seed() {
        Ok(seed) => seed,
        Err(refused) => {
            eprintln!("{refused}");
            return ExitCode::FAILURE;
        }
    };
    let mut arguments = Arguments::from_args();
    // Clauses that count a process's threads and descriptors, and the time that it uses, must have it for themselves.
    arguments.test_threads = Some(1);
    let trials = trials(subject, &arguments);
    if subject.setups().is_empty() {
        eprintln!("the subject {:?} has no setup: nothing was tested", subject.name());
        return ExitCode::FAILURE;
    }
    if let Some(seed) = seed {
        eprintln!("KVX_SEED={seed}: one run of each clause");
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Why a test is not run.
enum Skip {
    /// It says nothing about this backend.
    DoesNotApply(String),
    /// It would, but not here.
    Missing(String),
}

fn trials(subject: &'static dyn Subject, arguments: &Arguments) -> Vec<Trial> {
    let setups = subject.setups();
    let mut trials = Vec::new();
    for setup in &setups {
        // A runner that starts a process for each test names that test: then nothing else need be opened.
        let exact = arguments.filter.as_deref().filter(|_| arguments.exact);
        let prefix = format!("{}::", setup.name);
        if exact.is_some_and(|exact| exact != setup.name && !exact.starts_with(&prefix)) {
            continue;
        }
        let claims = match subject.probe(&setup.name).and_then(|()| claims(subject, setup)) {
            Ok(claims) => claims,
            Err(reason) => {
                trials.push(skipped(setup.name.clone(), Skip::Missing(reason), subject, arguments));
                continue;
            }
        };
        for place in Place::ALL {
            let name = format!("{}::{}", setup.name, place.name());
            if exact.is_some_and(|exact| exact != name && !exact.starts_with(&format!("{name}::")))
            {
                continue;
            }
            if let Err(skip) = available(subject, setup, place) {
                trials.push(skipped(name, skip, subject, arguments));
                continue;
            }
            for clause in clauses() {
                let name = format!("{name}::{}", clause.name);
                match fits(subject, clause, place, &claims) {
                    Err(reason) => {
                        let skip = Skip::DoesNotApply(reason);
                        trials.push(skipped(name, skip, subject, arguments));
                    }
                    Ok(()) => {
                        let setup = setup.clone();
                        let runner = move || all_seeds(subject, &setup, place, clause);
                        trials.push(Trial::test(name, runner));
                    }
                }
            }
        }
    }
    trials
}

fn skipped(name: String, skip: Skip, subject: &dyn Subject, arguments: &Arguments) -> Trial {
    let reason = match skip {
        Skip::Missing(reason) if required(subject.name()) => {
            let failed = format!("KVX_REQUIRE names {:?}, but: {reason}", subject.name());
            return Trial::test(name, move || Err(Failed::from(failed)));
        }
        Skip::Missing(reason) | Skip::DoesNotApply(reason) => reason,
    };
    // Runners ask for the list of ignored tests before they run the others. A run itself prints the reason.
    let listed = arguments.list || arguments.ignored || arguments.include_ignored;
    Trial::ignorable_test(name, move || Ok(Completion::ignored_with(&reason)))
        .with_ignored_flag(listed)
}

/// Whether the environment says that this backend must be tested.
fn required(name: &str) -> bool {
    names(&std::env::var("KVX_REQUIRE").unwrap_or_default(), name)
}

/// Whether a list of names has this one; `-` and `_` are alike.
fn names(list: &str, name: &str) -> bool {
    let plain = |name: &str| name.trim().replace('-', "_");
    list.split(',').any(|required| plain(required) == plain(name))
}

/// The one seed to run, where `KVX_SEED` names one.
///
/// # Errors
///
/// When it is set to something that is no seed.
pub fn seed() -> Result<Option<u64>, String> {
    let Some(text) = std::env::var_os("KVX_SEED") else { return Ok(None) };
    read_seed(&text.to_string_lossy()).map(Some)
}

fn read_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|error| {
        format!(
            "KVX_SEED={text:?} is no seed ({error}): set it to a number from 0 to {}, as a failed clause prints it, or \
             unset it to run all seeds",
            u64::MAX
        )
    })
}

fn available(subject: &dyn Subject, setup: &Setup, place: Place) -> Result<(), Skip> {
    subject.reaches(&setup.name, place).map_err(Skip::DoesNotApply)?;
    if place == Place::TwoNamespaces {
        super::namespace::Namespace::new().map_err(Skip::Missing)?;
    }
    Ok(())
}

/// What both sides of a setup claim.
fn claims(subject: &dyn Subject, setup: &Setup) -> Result<Claims, String> {
    let ground = Ground::new(setup, Place::OneProcess, 0);
    let open = |side| {
        let stage = subject.stage(&ground)?;
        stage.open(side).map(|backend| backend.capabilities().clone())
    };
    let claims = open("one").and_then(|one| Ok(Claims { one, other: open("other")? }));
    claims.map_err(|error| error.to_string())
}

/// Whether a clause says anything about a backend in this setup and place.
fn fits(
    subject: &dyn Subject,
    clause: &Clause,
    place: Place,
    claims: &Claims,
) -> Result<(), String> {
    if clause.here_only && place != Place::OneProcess {
        return Err("it looks inside one process".into());
    }
    let known = subject.faults();
    if place == Place::OneProcess
        && let Some(fault) = clause.faults.iter().find(|fault| !known.contains(fault))
    {
        return Err(format!("in one process there is no way to {fault} a side"));
    }
    clause.needs.iter().try_for_each(|need| need(claims))
}

/// Whether a clause says anything about a backend in this setup and place.
///
/// # Errors
///
/// Why it does not, or why that cannot be known.
pub fn applies(
    subject: &dyn Subject,
    setup: &Setup,
    place: Place,
    clause: &Clause,
) -> Result<(), String> {
    fits(subject, clause, place, &claims(subject, setup)?)
}

fn all_seeds(
    subject: &'static dyn Subject,
    setup: &Setup,
    place: Place,
    clause: &'static Clause,
) -> Result<(), Failed> {
    let long = std::env::var("KVX_LONG").is_ok_and(|value| value == "1");
    let count = if clause.once { 1 } else { u64::from(setup.seeds) * if long { 20 } else { 1 } };
    let seeds = match seed()? {
        Some(seed) => seed..=seed,
        None => 0..=count.saturating_sub(1),
    };
    for seed in seeds {
        check(subject, setup, place, clause, seed)?;
    }
    Ok(())
}

/// Runs a clause once.
///
/// # Errors
///
/// How it was broken: with its name, what it demands, and the seed.
pub fn check(
    subject: &'static dyn Subject,
    setup: &Setup,
    place: Place,
    clause: &'static Clause,
    seed: u64,
) -> Result<(), String> {
    let ground = Ground::new(setup, place, seed);
    attempt(subject, setup, ground, clause).map_err(|breach| {
        format!(
            "clause {} is broken: {breach}\n  it demands: {}\n  point of the contract: {}\n  \
             backend {:?}, setup {}, {}; run it again with KVX_SEED={seed}",
            clause.name,
            clause.about,
            clause.point,
            subject.name(),
            setup.name,
            place.name(),
        )
    })
}

/// Runs a clause on a thread of its own, which is left to itself if it hangs.
fn attempt(
    subject: &'static dyn Subject,
    setup: &Setup,
    ground: Ground,
    clause: &'static Clause,
) -> Verdict {
    let (pace, watch) = (setup.pace, Arc::new(Watch::default()));
    let (sender, receiver) = mpsc::channel();
    let seen = Arc::clone(&watch);
    let script = move || {
        let verdict =
            World::new(subject, ground, pace, seen).and_then(|world| (clause.run)(&world));
        // Nobody waits any more if it took too long.
        let _ = sender.send(verdict);
    };
    let thread = std::thread::Builder::new()
        .name(clause.name.chars().take(15).collect())
        .spawn(script)
        .map_err(|error| Breach::new(format!("the kit cannot start a thread: {error}")))?;
    match receiver.recv_timeout(pace.budget) {
        Ok(verdict) => {
            wait_for_end(&thread);
            verdict
        }
        Err(mpsc::RecvTimeoutError::Timeout) => Err(Breach::new(format!(
            "it hangs: after {:?} it is still in {}",
            pace.budget,
            watch.place()
        ))),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            let place = watch.place();
            let said = thread.join().err().map_or_else(|| "nothing".into(), |said| words(&*said));
            Err(Breach::new(format!("panicked in {place}: {said}")))
        }
    }
}

/// Lets the thread end what it holds, so that the next clause does not count it.
fn wait_for_end(thread: &std::thread::JoinHandle<()>) {
    for _ in 0..1000 {
        if thread.is_finished() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn words(said: &(dyn Any + Send)) -> String {
    let text = said.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| said.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_number_or_refused_with_its_text() {
        assert_eq!(read_seed("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "abc", "-1", "18446744073709551616", "0x1"] {
            let refused = read_seed(text).unwrap_err();
            let named = format!("KVX_SEED={text:?}");
            assert!(refused.contains(&named) && refused.contains("unset"), "{refused}");
        }
    }

    #[test]
    fn a_required_backend_may_be_written_either_way() {
        assert!(names("mock, plain_tcp", "plain-tcp") && names("plain-tcp", "plain_tcp"));
        assert!(!names("plain", "plain-tcp") && !names("", "mock"));
    }
}
