//! What a script has in hand: sides that can be opened, met, waited for and harmed.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::SEVER_BOUND;
use kvx_core::capability::Capabilities;
use kvx_core::id::PeerId;
use kvx_core::transfer::{Mode, PostedSegment};

use super::clause::{Breach, Verdict, ensure};
use super::command::End;
use super::dice::Dice;
use super::host::Host;
use super::lane::{Lane, Memory};
use super::namespace::Namespace;
use super::peer::Child;
use super::side::{Link, Side};
use super::subject::{Fault, Ground, Pace, Place, Stage, Subject};
use super::watch::Watch;

/// The world of one run of one clause.
pub(crate) struct World {
    stage: Box<dyn Stage>,
    ground: Ground,
    pace: Pace,
    watch: Arc<Watch>,
    dice: Dice,
    ids: Cell<u64>,
    /// Kept until the end, because this process's address is that of the first. That one is made before any side is opened,
    /// and not in use yet.
    namespaces: RefCell<Vec<Namespace>>,
    fresh: Cell<bool>,
}

/// How many events a poll has room for, unless the script says otherwise.
pub(crate) const ROOM: u32 = 64;

impl World {
    pub(crate) fn new(
        subject: &'static dyn Subject,
        mut ground: Ground,
        pace: Pace,
        watch: Arc<Watch>,
    ) -> Verdict<Self> {
        let namespace = match ground.place {
            Place::TwoNamespaces => Some(Namespace::new().map_err(Breach::new)?),
            _ => None,
        };
        ground.address = namespace.as_ref().map(|namespace| namespace.here);
        let stage = subject
            .stage(&ground)
            .map_err(|error| Breach::new(format!("no stage to be had: {error}")))?;
        let dice = Dice::new(ground.seed);
        let namespaces = RefCell::new(namespace.into_iter().collect());
        let (ids, fresh) = (Cell::new(1), Cell::new(true));
        Ok(Self { stage, ground, pace, watch, dice, ids, namespaces, fresh })
    }

    pub(crate) const fn dice(&self) -> &Dice {
        &self.dice
    }

    /// Posts a batch under an id of the script's own, as soon as there is room.
    pub(crate) fn post_as(
        &self,
        id: u64,
        (side, peer): (&Side, PeerId),
        mode: Mode,
        segments: &[PostedSegment],
    ) -> Verdict {
        self.wait(&[side], "room to post", || side.submit(id, peer, mode, segments, None))
    }

    pub(crate) const fn pace(&self) -> Pace {
        self.pace
    }

    /// A transfer's id that was not used before.
    pub(crate) fn id(&self) -> u64 {
        self.ids.replace(self.ids.get() + 1)
    }

    /// Opens a side in this process.
    pub(crate) fn open_here(&self, name: &str) -> Verdict<Side> {
        self.watch.enters(name, "open");
        let backend = self.stage.open(name);
        self.watch.leaves();
        let backend = backend.map_err(|error| Breach::refused(name, "open", error.into()))?;
        let host = Host::new(backend, self.pace.patience, self.ground.allocated);
        Ok(Side::new(name, Link::Here(host), Arc::clone(&self.watch)))
    }

    /// Opens a side where peers are.
    pub(crate) fn open(&self, name: &str) -> Verdict<Side> {
        let mut namespaces = self.namespaces.borrow_mut();
        let namespace = match self.ground.place {
            Place::OneProcess => return self.open_here(name),
            Place::TwoProcesses => None,
            Place::TwoNamespaces => {
                if !self.fresh.replace(false) {
                    namespaces.push(Namespace::new().map_err(Breach::new)?);
                }
                namespaces.last()
            }
        };
        let address = namespace.map(|namespace| namespace.there);
        let ground = Ground { address, ..self.ground.clone() };
        let child = Child::start(&ground, name, self.pace.patience, namespace)?;
        Ok(Side::new(name, Link::There(child), Arc::clone(&self.watch)))
    }

    /// Kills, stops or resumes a peer.
    pub(crate) fn inflict(&self, fault: Fault, side: &Side) -> Verdict {
        match side.child() {
            Some(child) => child.inflict(fault),
            None => self.stage.inflict(fault, side.name()).map_err(|error| {
                Breach::new(format!("the stage cannot {fault} {}: {error}", side.name()))
            }),
        }
    }

    /// Runs a handshake that `one` begins.
    pub(crate) fn meet(&self, one: &Side, other: &Side) -> Verdict<Pair> {
        let (at_other, reply) = other.accept(&one.offer()?)?;
        let (at_one, completion) = one.complete(&reply)?;
        let finished = other.finish(&completion)?;
        ensure!(
            finished == at_other,
            "`finish` gave peer {finished}, `accept` had given {at_other} (law of handshake.steps)"
        );
        one.connect(at_one)?;
        other.connect(at_other)?;
        Ok(Pair { one: one.clone(), other: other.clone(), at_one, at_other })
    }

    /// Two sides that have met: one in this process, and a peer.
    pub(crate) fn pair(&self) -> Verdict<Pair> {
        let one = self.open_here("one")?;
        self.meet(&one, &self.open("other")?)
    }

    /// Registered memory of `bytes` bytes at a side.
    pub(crate) fn memory(&self, side: &Side, bytes: u64) -> Verdict<Memory> {
        Memory::new(side, bytes, self.dice.next())
    }

    /// Memory at both ends of a pair, and the other's key at the one.
    pub(crate) fn lane(&self, pair: &Pair, bytes: u64) -> Verdict<Lane> {
        self.lane_between(pair, self.memory(&pair.one, bytes)?, self.memory(&pair.other, bytes)?)
    }

    /// The same over these memories.
    pub(crate) fn lane_between(&self, pair: &Pair, local: Memory, remote: Memory) -> Verdict<Lane> {
        let blob = pair.other.key_blob(remote.region)?;
        let key = pair.one.import_key(pair.at_one, &blob)?;
        Ok(Lane { pair: pair.clone(), local, remote, key })
    }

    /// Polls these sides, in turns, until something holds. A wait that is too long is a breach, with what was waited for.
    pub(crate) fn wait(
        &self,
        sides: &[&Side],
        what: &str,
        holds: impl FnMut() -> Verdict<bool>,
    ) -> Verdict {
        self.wait_within(self.pace.patience, sides, what, holds)
    }

    /// As [`wait`](Self::wait), within a bound of the contract's.
    pub(crate) fn wait_within(
        &self,
        limit: Duration,
        sides: &[&Side],
        what: &str,
        mut holds: impl FnMut() -> Verdict<bool>,
    ) -> Verdict {
        let begin = Instant::now();
        let mut polls = 0;
        loop {
            let mut events = 0;
            for side in sides {
                events += side.poll(ROOM)?;
            }
            if holds()? {
                return Ok(());
            }
            polls += 1;
            ensure!(
                begin.elapsed() < limit || polls < self.pace.polls,
                "waited for {what}, in vain: {:?} and {polls} polls of {}",
                begin.elapsed(),
                names(sides)
            );
            self.rest(polls, events);
        }
    }

    /// Polls these sides as long as something that must not happen is given time to happen.
    pub(crate) fn settle_down(&self, sides: &[&Side]) -> Verdict {
        let begin = Instant::now();
        let mut polls = 0;
        while begin.elapsed() < self.pace.quiet || polls < self.pace.quiet_polls {
            let mut events = 0;
            for side in sides {
                events += side.poll(ROOM)?;
            }
            polls += 1;
            self.rest(polls, events);
        }
        Ok(())
    }

    /// Leaves the processor to the fabric, if it has a clock.
    fn rest(&self, polls: u32, events: usize) {
        if events == 0 && polls > 20 && !self.pace.quiet.is_zero() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Posts a batch that fits the limits, as soon as there is room.
    pub(crate) fn post(
        &self,
        side: &Side,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Verdict<u64> {
        let id = self.id();
        self.wait(&[side], "room to post", || side.submit(id, peer, mode, segments, notify))?;
        Ok(id)
    }

    /// Waits until transfers have settled, all as done.
    pub(crate) fn done(&self, side: &Side, ids: &[u64]) -> Verdict {
        let what = format!("transfers {ids:?} of {} to settle (law of settled.once)", side.name());
        self.wait(&[side], &what, || Ok(ids.iter().all(|id| side.settled(*id).is_some())))?;
        for id in ids {
            if let Some(end @ (End::Cancelled | End::Failed(_))) = side.settled(*id) {
                return Err(Breach::new(format!(
                    "transfer {id} of {} settled as {end:?}",
                    side.name()
                )));
            }
        }
        Ok(())
    }

    /// Waits, within the contract's bound, until all that a side had in flight to a peer has settled, and the peer is down.
    pub(crate) fn severed(&self, side: &Side, peer: PeerId) -> Verdict {
        // The clock runs since the call, not since it returned.
        let begun = side.ended_at(peer);
        let bound = || SEVER_BOUND.saturating_sub(begun.map_or(Duration::ZERO, |at| at.elapsed()));
        let left = || side.in_flight_to(peer);
        let what = format!("all transfers of {} to peer {peer} to settle", side.name());
        self.wait_within(bound(), &[side], &what, || Ok(left().is_empty()))?;
        let what = format!("peer {peer} of {} to be down", side.name());
        self.wait_within(SEVER_BOUND, &[side], &what, || Ok(side.down(peer).is_some()))
    }

    /// A notification's bytes: `number`, in as many bytes as fit.
    pub(crate) fn note(&self, limits: &Capabilities, number: u64) -> Vec<u8> {
        let most = limits.limits.max_notification_bytes.min(8) as usize;
        number.to_le_bytes()[..most].to_vec()
    }
}

fn names(sides: &[&Side]) -> String {
    sides.iter().map(|side| side.name()).collect::<Vec<_>>().join(" and ")
}

/// Two sides that have met. Clones are the same two.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) one: Side,
    pub(crate) other: Side,
    /// The handle by which the one knows the other.
    pub(crate) at_one: PeerId,
    /// The handle by which the other knows the one.
    pub(crate) at_other: PeerId,
}

impl Pair {
    /// The same two, seen from the other.
    pub(crate) fn flipped(&self) -> Self {
        Self {
            one: self.other.clone(),
            other: self.one.clone(),
            at_one: self.at_other,
            at_other: self.at_one,
        }
    }
}
