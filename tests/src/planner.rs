//! Holds the planner of [`kvx_core::plan`] against the [`oracle`](crate::oracle).

use kvx_core::capability::Limits;
use kvx_core::plan::{Pair, Pairing, PeerPlan, SegmentList};
use kvx_core::transfer::{Mode, Segment};

use crate::oracle::{Fault, Oracle, Run, Scene, check_cut};

/// How a scene is carried out.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Who carries it out: the consumer reads or the producer writes.
    pub mode: Mode,
    /// Limits of the fabric.
    pub limits: Limits,
    /// See [`Pairing::new`].
    pub rotation: u32,
}

impl Default for Trial {
    /// Reads without limits.
    fn default() -> Self {
        Self { mode: Mode::Read, limits: Limits::unlimited(), rotation: 0 }
    }
}

/// What was moved in a scene.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Pairs of ranks.
    pub pairs: u64,
    /// Segments of all pairs, before limits.
    pub segments: u64,
    /// Bytes of all pairs.
    pub bytes: u64,
}

/// Plans all that `scene` asks for and checks it against the oracle: every byte that must be written is written exactly once, from
/// the right source; no other byte is; before limits no shorter list exists, and lists are sorted by where they are written;
/// limits are kept with the fewest cuts; reading and writing move the same bytes; planning twice gives the same.
///
/// # Errors
///
/// What was found to be wrong; [`Fault::Scene`] where the request cannot be served and the planner refuses it, as it must;
/// [`Fault::Contradiction`] where the scene itself is impossible.
pub fn check(scene: &Scene, trial: &Trial) -> Result<Moved, Fault> {
    let (producers, consumers) = (&scene.producer.ranks, &scene.consumer.ranks);
    let pairing = Pairing::new(producers, consumers, trial.rotation).map_err(Fault::Refused)?;
    let oracle = match Oracle::new(scene, pairing.pairs()) {
        Err(Fault::Scene(why)) => {
            let refused = pairing.pairs().iter().any(|pair| plan(scene, pair, trial).is_err());
            return Err(if refused {
                Fault::Scene(why)
            } else {
                Fault::Segments(format!("the planner takes a request that cannot be served: {why}"))
            });
        }
        other => other?,
    };
    let mut memory = oracle.memory()?;
    let mut moved = Moved::default();
    for pair in pairing.pairs() {
        let lists = plan(scene, pair, trial).map_err(Fault::Refused)?;
        oracle.check_fewest(pair.producer, pair.consumer, trial.mode, &lists.whole)?;
        check_cut(&lists.whole, &lists.cut, &trial.limits)?;
        check_reversed(&lists, trial.mode)?;
        check_foretold(&lists)?;
        memory.apply(pair.producer, pair.consumer, trial.mode, &lists.cut)?;
        moved.pairs += 1;
        moved.segments += lists.whole.len() as u64;
        moved.bytes += lists.whole.iter().map(|segment| segment.bytes).sum::<u64>();
    }
    oracle.check(&memory)?;
    Ok(moved)
}

/// A pair's segments in a trial's mode.
struct Lists {
    /// Without limits.
    whole: Vec<Segment>,
    /// Within the trial's limits.
    cut: Vec<Segment>,
    /// Without limits, in the other mode.
    reversed: Vec<Segment>,
    /// What was foretold of the first.
    runs: u64,
}

fn plan(scene: &Scene, pair: &Pair, trial: &Trial) -> Result<Lists, kvx_core::Error> {
    let (producer, consumer) =
        (&scene.producer.ranks[pair.producer], &scene.consumer.ranks[pair.consumer]);
    let plan = PeerPlan::compile(producer, consumer, pair)?;
    let tables = (scene.producer.borrowed_tables(), scene.consumer.borrowed_tables());
    let request = scene.request(&tables.0, &tables.1);
    let mut list = SegmentList::new();
    let mut segments = |mode, limits: &Limits| {
        plan.segments(&request, mode, limits, &mut list)?;
        let batches: Vec<&[Segment]> = list.batches().collect();
        let most = usize::try_from(limits.max_batch_segments).unwrap_or(usize::MAX);
        let fits = batches.iter().all(|batch| !batch.is_empty() && batch.len() <= most);
        if !fits || batches.concat() != list.as_slice() {
            return Err(kvx_core::Error::new(
                kvx_core::ErrorKind::Internal,
                "plan.batches",
                "batches are too long, or are not the list",
            ));
        }
        Ok(list.as_slice().to_vec())
    };
    let other = match trial.mode {
        Mode::Read => Mode::Write,
        Mode::Write => Mode::Read,
    };
    Ok(Lists {
        reversed: segments(other, &Limits::unlimited())?,
        // After the others, into the list that they have filled.
        whole: segments(trial.mode, &Limits::unlimited())?,
        cut: segments(trial.mode, &trial.limits)?,
        runs: plan.runs(&request)?,
    })
}

/// A list is never longer than was foretold, and there is none where nothing was.
fn check_foretold(lists: &Lists) -> Result<(), Fault> {
    let (listed, runs) = (lists.whole.len() as u64, lists.runs);
    if listed <= runs && (listed == 0) == (runs == 0) {
        return Ok(());
    }
    Err(Fault::Segments(format!("{listed} segments were listed, {runs} runs were foretold")))
}

/// Reading and writing move the same bytes, with local and remote changed over.
fn check_reversed(lists: &Lists, mode: Mode) -> Result<(), Fault> {
    let other = match mode {
        Mode::Read => Mode::Write,
        Mode::Write => Mode::Read,
    };
    let here = lists.whole.iter().map(|segment| Run::of(segment, mode));
    let there = lists.reversed.iter().map(|segment| Run::of(segment, other));
    if here.eq(there) {
        return Ok(());
    }
    Err(Fault::Segments(format!(
        "{mode} and {other} differ: {:?} and {:?}",
        lists.whole, lists.reversed
    )))
}
