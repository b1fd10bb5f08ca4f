//! What goes wrong in a replay, and when.

use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::proxy::Weather;

/// The consumer's process.
pub(crate) const CONSUMER: usize = 0;

/// The producer's that has faults; another one has none.
pub(crate) const PRODUCER: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is killed, and started again after this time: with another number of blocks, at the same address.
    Kill(usize, Duration),
    /// It stands still for this time.
    Stop(usize, Duration),
    /// Its control channel has this weather for this time.
    Weather(Weather, Duration),
    /// Packets to and from the faulty producer's control channel are dropped, for this time.
    Drop(Duration),
}

/// A kind of fault.
pub(crate) type Kind = u8;

pub(crate) const KILL_PRODUCER: Kind = 0;
pub(crate) const KILL_CONSUMER: Kind = 1;
pub(crate) const STOP_PRODUCER: Kind = 2;
pub(crate) const STOP_CONSUMER: Kind = 3;
pub(crate) const PARTITION: Kind = 4;
pub(crate) const DELAY: Kind = 5;
pub(crate) const LOSS: Kind = 6;
pub(crate) const CUT: Kind = 7;
pub(crate) const FLIP: Kind = 8;

/// All that need no packet filter.
pub(crate) const ALL: [Kind; 9] =
    [KILL_PRODUCER, KILL_CONSUMER, STOP_PRODUCER, STOP_CONSUMER, PARTITION, DELAY, LOSS, CUT, FLIP];

/// Those of processes, but for a start at an address to which there is no route.
pub(crate) const PROCESSES: [Kind; 3] = [KILL_CONSUMER, STOP_PRODUCER, STOP_CONSUMER];

/// What goes wrong in the replay of this seed. Seeds in a row begin with all these kinds of faults, in turn.
pub(crate) fn draw(
    seed: u64,
    kinds: &[Kind],
    filtered: bool,
    chance: &mut ChaCha8Rng,
) -> Vec<(Duration, Fault)> {
    let first = usize::try_from(seed % kinds.len() as u64).unwrap();
    let mut all = Vec::new();
    for number in 0..chance.random_range(1..=3) {
        let kind = if number == 0 { first } else { chance.random_range(0..kinds.len()) };
        all.push((millis(150..900, chance), fault(kinds[kind], chance)));
    }
    if filtered {
        all.push((millis(150..500, chance), Fault::Drop(millis(500..1200, chance))));
    }
    all
}

fn fault(kind: Kind, chance: &mut ChaCha8Rng) -> Fault {
    let brief = millis(200..700, chance);
    // Longer than the silence after which a peer is gone.
    let long = millis(600..1100, chance);
    match kind {
        KILL_PRODUCER => Fault::Kill(PRODUCER, millis(0..200, chance)),
        KILL_CONSUMER => Fault::Kill(CONSUMER, millis(0..200, chance)),
        STOP_PRODUCER => Fault::Stop(PRODUCER, long),
        STOP_CONSUMER => Fault::Stop(CONSUMER, long),
        PARTITION => Fault::Weather(Weather::Partition, long),
        DELAY => Fault::Weather(Weather::Delay(millis(5..120, chance)), brief),
        LOSS => Fault::Weather(Weather::Loss, brief),
        CUT => Fault::Weather(Weather::Cut, brief),
        _ => Fault::Weather(Weather::Flip, brief),
    }
}

fn millis(range: std::ops::Range<u64>, chance: &mut ChaCha8Rng) -> Duration {
    Duration::from_millis(chance.random_range(range))
}
