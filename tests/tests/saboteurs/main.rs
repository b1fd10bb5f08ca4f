//! Backends with one deliberate fault each: every clause of the conformance kit must find out its own, and pass on the same
//! backend without one.
//!
//! `KVX_SEED` runs one seed, as in the kit.

mod being;
mod blocking;
mod data;
mod ending;
mod flow;
mod meeting;
mod memory;
mod notes;
mod outcome;
mod table;
mod tools;
mod wrapper;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use kvx_core::Result;
use kvx_core::backend::TransferBackend;
use kvx_core::capability::{Capabilities, Limits, Revoke};
use kvx_mock::{Fabric, Preset};
use kvx_tests::suite::{self, Clause, Fault, Ground, Place, Setup, Stage, Subject};
use libtest_mimic::{Arguments, Failed, Trial};

use crate::table::{SABOTEURS, Saboteur};
use crate::wrapper::{Honest, Sabotage, Sabotaged};

/// Setups on which saboteurs are found out.
const SETUPS: [&str; 6] = ["rc", "efa", "tiny", "unequal", "regions", "descriptor"];

/// Most seeds that a saboteur may need to be found out.
const SEEDS: u64 = 12;

/// The mock, wrapped: with a fault, or without one.
struct Wrapped(Option<&'static Saboteur>);

impl Subject for Wrapped {
    fn name(&self) -> &'static str {
        self.0.map_or("mock, wrapped", |saboteur| saboteur.name)
    }

    fn setups(&self) -> Vec<Setup> {
        SETUPS.map(setup).to_vec()
    }

    fn faults(&self) -> &[Fault] {
        &[Fault::Kill, Fault::Stop, Fault::Resume]
    }

    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
        let fault = match self.0 {
            Some(saboteur) => (saboteur.make)(),
            None => Arc::new(Honest),
        };
        Ok(Box::new(Sabotaging {
            fabric: Fabric::new(ground.seed),
            setup: ground.setup.clone(),
            fault,
            opened: AtomicUsize::new(0),
        }))
    }
}

fn setup(name: &str) -> Setup {
    // What never comes is not waited for as long as in earnest.
    Setup::stepped(name, 1).with_patience(Duration::from_millis(20))
}

/// A fabric all of whose sides have the same fault.
struct Sabotaging {
    fabric: Fabric,
    setup: String,
    fault: Arc<dyn Sabotage>,
    opened: AtomicUsize,
}

impl Stage for Sabotaging {
    fn open(&self, side: &str) -> Result<Arc<dyn TransferBackend>> {
        let preset = match self.setup.as_str() {
            "tiny" => limited(Preset::efa(), [48, 2, 8, 1])?,
            "unequal" if side == "one" => limited(Preset::rc(), [1000, 4, 64, 4])?,
            "unequal" => limited(Preset::rc(), [300, 9, 32, 16])?,
            "efa" | "regions" => Preset::efa(),
            _ => Preset::rc(),
        };
        let claim: fn(&mut Capabilities) = match self.setup.as_str() {
            // The mock enforces the end of a registration; it does not claim it.
            "regions" => |claims| claims.revoke = Revoke::PerRegion,
            "descriptor" => |claims| claims.event_fd = true,
            _ => |_| {},
        };
        let backend = self.fabric.backend(preset, side);
        let index = self.opened.fetch_add(1, SeqCst);
        Ok(Arc::new(Sabotaged::new(backend, index, Arc::clone(&self.fault), claim)?))
    }

    fn inflict(&self, fault: Fault, side: &str) -> Result<()> {
        match fault {
            Fault::Kill => self.fabric.kill(side),
            Fault::Stop => self.fabric.stop(side),
            Fault::Resume => self.fabric.resume(side),
        }
    }
}

/// A preset with other limits: bytes of a segment, segments of a batch, bytes of a notification, batches in flight.
fn limited(like: Preset, limits: [u32; 4]) -> Result<Preset> {
    let mut capabilities = like.capabilities().clone();
    let of: &mut Limits = &mut capabilities.limits;
    of.max_segment_bytes = limits[0].into();
    [of.max_batch_segments, of.max_notification_bytes, of.max_in_flight] =
        [limits[1], limits[2], limits[3]];
    Preset::custom(capabilities)
}

/// What came of a test.
type Tested = std::result::Result<(), Failed>;

/// The clause fails on the saboteur, and says that it was the clause that failed.
fn is_found_out(clause: &'static Clause, saboteur: &'static Saboteur) -> Tested {
    let subject: &'static Wrapped = Box::leak(Box::new(Wrapped(Some(saboteur))));
    for seed in seeds(SEEDS)? {
        let setup = setup(saboteur.setup);
        if let Err(text) = suite::check(subject, &setup, Place::OneProcess, clause, seed) {
            let named = format!("clause {} is broken", clause.name());
            if !text.contains(&named) {
                return Err(format!("found out, but the clause is not named: {text}").into());
            }
            eprintln!("seed {seed}: {text}");
            return Ok(());
        }
    }
    Err(format!("clause {} does not find out {}", clause.name(), saboteur.name).into())
}

/// The clause holds on the wrapped mock without a fault.
fn holds(clause: &'static Clause, name: &'static str) -> Tested {
    static HONEST: Wrapped = Wrapped(None);
    for seed in seeds(2)? {
        suite::check(&HONEST, &setup(name), Place::OneProcess, clause, seed)?;
    }
    Ok(())
}

fn seeds(count: u64) -> std::result::Result<RangeInclusive<u64>, Failed> {
    Ok(match suite::seed()? {
        Some(seed) => seed..=seed,
        None => 0..=count - 1,
    })
}

/// Every saboteur that a clause names exists, and every one that exists is named by a clause.
fn table_is_whole() -> Tested {
    let known: BTreeSet<_> = SABOTEURS.iter().map(|saboteur| saboteur.name).collect();
    let named: BTreeSet<_> =
        suite::clauses().flat_map(|clause| clause.saboteurs()).copied().collect();
    let missing: Vec<_> = named.difference(&known).collect();
    let idle: Vec<_> = known.difference(&named).collect();
    if !missing.is_empty() || !idle.is_empty() {
        return Err(format!(
            "saboteurs that do not exist: {missing:?}; that no clause names: {idle:?}"
        )
        .into());
    }
    if known.len() != SABOTEURS.len() {
        return Err("two saboteurs have one name".into());
    }
    if SABOTEURS.len() < 25 {
        return Err(format!("{} saboteurs are too few", SABOTEURS.len()).into());
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Some clauses count what the process has.
    arguments.test_threads = Some(1);
    let mut trials = vec![Trial::test("table_is_whole", table_is_whole)];
    for clause in suite::clauses() {
        let setups: BTreeSet<_> = SABOTEURS
            .iter()
            .filter(|saboteur| clause.saboteurs().contains(&saboteur.name))
            .map(|saboteur| saboteur.setup)
            .collect();
        for name in setups {
            let trial = format!("honest::{}::{name}", clause.name());
            trials.push(Trial::test(trial, move || holds(clause, name)));
        }
        for saboteur in SABOTEURS {
            if clause.saboteurs().contains(&saboteur.name) {
                let trial = format!("caught::{}::{}", clause.name(), saboteur.name);
                trials.push(Trial::test(trial, move || is_found_out(clause, saboteur)));
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
