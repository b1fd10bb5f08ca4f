//! Engines of random shapes on the seeded mock, with a control channel that breaks, clocks that differ, aborts, preemptions,
//! restarts, and every fault that the fabric can do. After every event: what is reported ready is exact and not stale, what
//! has ended moves no more, and everything ends in time.

mod engine;
mod mad;
mod net;
mod world;

use kvx_connector::protocol::{Access, Plant};
use kvx_mock::Preset;
use kvx_tests::{strategy, sweep};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use world::{Tally, World};

fn preset(seed: u64) -> Preset {
    match seed % 3 {
        0 => Preset::rc(),
        1 => Preset::efa(),
        _ => Preset::ucx_tcp(),
    }
}

/// A world of this seed, for what is done in it; `None` where two engines came up that have nothing to say to each other.
fn within<T>(
    seed: u64,
    access: Access,
    plant: Option<Plant>,
    act: impl FnOnce(World<'_>, ChaCha8Rng) -> T,
) -> Option<T> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let chance = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner =
        TestRunner::new_with_rng(Config { failure_persistence: None, ..Config::default() }, chance);
    let recipes = strategy::recipe(strategy::model(), strategy::engine(), strategy::engine());
    let recipe = recipes.new_tree(&mut runner).ok()?.current();
    let scene = recipe.scene().ok()?;
    let stream = |number| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(number);
        rng
    };
    let world = World::new(&scene, seed, preset(seed), stream(7), stream(8), plant, access)?;
    Some(act(world, stream(9)))
}

fn run(seed: u64, plant: Option<Plant>) -> Option<Result<Tally, String>> {
    let access = if seed % 4 == 3 { Access::Write } else { Access::Read };
    within(seed, access, plant, |world, _| world.run(150))
}

/// A member that says anything to everybody, and says again what others said: nothing panics, nothing grows, nothing wrong is
/// ever ready, and once it is silent everything is served. With `KVX_LONG=1` 10,000,000 frames.
#[test]
fn a_member_that_says_anything_harms_nobody_for_long() {
    let long = std::env::var("KVX_LONG").is_ok_and(|value| value == "1");
    let (frames, each) = if long { (10_000_000, 500_000) } else { (200_000, 20_000) };
    let seeds = kvx_mock::sim::seeds(u64::MAX).unwrap();
    let (mut all, mut heard) = (Tally::default(), mad::Heard::default());
    for seed in seeds {
        let Some(result) =
            within(seed, Access::Read, None, |world, rng| world.run_beside(each, rng))
        else {
            continue;
        };
        let (tally, one) = result.unwrap_or_else(|broken| panic!("KVX_SEED={seed}: {broken}"));
        all.add(&tally);
        heard.add(&one);
        if heard.said >= frames {
            break;
        }
    }
    eprintln!("{heard:?}; {all:?}");
    assert!(heard.bad > 0 && heard.sessions > 0 && all.ready > 0, "{heard:?}, {all:?}");
}

/// Seeds that are run when nothing is said.
const COUNT: u64 = if cfg!(debug_assertions) { 300 } else { 50_000 };

#[test]
fn every_promise_is_kept_under_every_fault() {
    let seeds = kvx_mock::sim::seeds(COUNT).unwrap();
    let tally = sweep(
        seeds.clone(),
        |seed| run(seed, None).unwrap_or_else(|| Ok(Tally::default())),
        |sum, one| sum.add(&one),
    );
    eprintln!("{seeds:?}: {tally:?}");
    if seeds.end - seeds.start > 100 {
        assert!(
            tally.runs > 50
                && tally.ready > 50
                && tally.failed > 0
                && tally.aborted > 0
                && tally.edited > 0,
            "{tally:?}"
        );
    }
}

/// A seed that has found something. The writer's connection had ended, and its session a moment later: it never told the owner that it
/// was quiet, which kept the blocks for good.
#[test]
fn what_was_found_stays_mended() {
    let ended = run(39_611, None).expect("this seed is of engines");
    ended.unwrap_or_else(|broken| panic!("KVX_SEED=39611: {broken}"));
}

/// Without this, that nothing is found would say nothing: faults of the machines that the whole must show, too. What each of all
/// that there are is found by is in the simulation of the machines alone.
#[test]
fn faults_of_the_machines_are_found_through_the_whole() {
    for plant in [
        Plant::ClocksCompared,
        Plant::ConfirmBeforeSettle,
        Plant::FreeBeforeConfirm,
        Plant::FailureBeforeSiblings,
        Plant::AbortUnpinsEarly,
        Plant::OneSourceIsAll,
        Plant::FingerprintIgnored,
    ] {
        let found = (0..1000).find_map(|seed| Some((seed, run(seed, Some(plant))?.err()?)));
        let Some((seed, broken)) = found else { panic!("{plant:?} was not found") };
        eprintln!("{plant:?}: seed {seed}: {broken}");
    }
}
