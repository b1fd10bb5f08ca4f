//! What a seed asks for: climate, shapes, times.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::id::Incarnation;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::protocol::id::{Fingerprint, LeaseName, Part, TransferKey};
use crate::protocol::terms::Access;
use crate::protocol::user::Prove;
use crate::protocol::{owner, user};

/// What may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Climate {
    /// Nothing: messages come in any order, transfers are slow or find no room, and every request must be ready.
    Fair,
    /// Messages are lost and doubled, transfers fail now and then, and every request must be ready.
    Lossy,
    /// Everything.
    Wild,
}

impl Climate {
    /// That of a seed: of eight, two are fair, two lossy.
    #[must_use]
    pub const fn of(seed: u64) -> Self {
        match seed % 8 {
            0 | 1 => Self::Fair,
            2 | 3 => Self::Lossy,
            _ => Self::Wild,
        }
    }
}

/// A source of chance.
pub(super) struct Dice(pub(super) ChaCha8Rng);

impl Dice {
    pub(super) fn chance(&mut self, of: u32, among: u32) -> bool {
        self.0.random_range(0..among) < of
    }

    /// From `low` to `high`, both among them.
    pub(super) fn among(&mut self, low: u64, high: u64) -> u64 {
        self.0.random_range(low..=high)
    }

    pub(super) fn index(&mut self, count: usize) -> usize {
        self.0.random_range(0..count)
    }

    pub(super) fn life(&mut self) -> Incarnation {
        Incarnation::from_bytes(self.0.random())
    }
}

/// What a user does that is mistaken in what it may do.
pub(super) const fn other(access: Access) -> Access {
    match access {
        Access::Read => Access::Write,
        Access::Write => Access::Read,
    }
}

/// How a user is mistaken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// It reads what is to be written, or the other way round.
    Access,
    /// Its ticket was edited.
    Ticket,
}

/// Times and rates of one run. Times are microseconds of the world's clock, unless they are durations, which are of a machine's.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) climate: Climate,
    pub(super) owners: usize,
    pub(super) users: usize,
    pub(super) jobs: u64,
    /// Messages lost, and doubled, of a hundred.
    pub(super) lost: u32,
    pub(super) doubled: u32,
    /// The longest time that a message takes, and one in a hundred.
    pub(super) late: u64,
    pub(super) very_late: u64,
    /// Whether delays are whole milliseconds, so that things happen in the same moment.
    pub(super) coarse: bool,
    pub(super) revocable: bool,
    pub(super) ttl: Duration,
    pub(super) hard: Duration,
    pub(super) deadline: Duration,
    pub(super) encoded: bool,
    /// Whether nobody says what later versions have added.
    pub(super) earlier: bool,
    pub(super) owner: owner::Config,
    pub(super) user: user::Config,
}

impl Setting {
    pub(super) fn new(seed: u64, dice: &mut Dice) -> Self {
        let climate = Climate::of(seed);
        let millis = |low, high, dice: &mut Dice| Duration::from_millis(dice.among(low, high));
        let revocable = dice.chance(1, 2);
        let (ttl, hard, deadline) = match climate {
            Climate::Fair => {
                (millis(100, 300, dice), Duration::from_secs(60), Duration::from_secs(20))
            }
            Climate::Lossy => {
                (Duration::from_secs(150), Duration::from_secs(200), Duration::from_secs(60))
            }
            Climate::Wild => {
                let ttl = millis(30, 300, dice);
                (ttl, ttl * u32::try_from(dice.among(1, 6)).unwrap_or(1), millis(50, 1000, dice))
            }
        };
        let life = Incarnation::from_bytes([0; 16]);
        let mut owner = owner::Config::new(life);
        owner.early_for = Duration::from_millis(200);
        owner.keep_for = millis(10, 100, dice);
        owner.revoke_after = revocable.then(|| Duration::from_millis(dice.among(10, 50)));
        owner.quarantine_after = millis(60, 200, dice);
        let mut user = user::Config::default();
        user.hold_every =
            if climate == Climate::Lossy { Duration::from_millis(500) } else { ttl / 4 };
        user.hold_first = millis(0, 20, dice).min(user.hold_every);
        user.again_first = millis(5, 40, dice);
        user.again_most = millis(40, 200, dice);
        user.window = usize::try_from(dice.among(1, 4)).unwrap_or(1);
        user.release_for = Duration::from_secs(2);
        user.grace = millis(10, 50, dice);
        user.sever_for = millis(30, 100, dice);
        user.retries = if climate == Climate::Lossy { 50 } else { 2 };
        let wild = climate == Climate::Wild;
        Self {
            climate,
            owners: dice.index(3) + 1,
            users: dice.index(3) + 1,
            jobs: dice.among(1, 5),
            lost: if climate == Climate::Fair || dice.chance(1, 4) { 0 } else { 25 },
            doubled: if climate == Climate::Fair { 0 } else { 15 },
            late: dice.among(1, 8) * 1000,
            very_late: if climate == Climate::Fair { 8_000 } else { 400_000 },
            coarse: wild && dice.chance(1, 2),
            revocable,
            ttl,
            hard,
            deadline,
            encoded: seed % 16 == 5,
            earlier: seed % 5 == 3,
            owner,
            user,
        }
    }
}

/// One request, from the grant to the last attempt.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) access: Access,
    pub(super) lease: LeaseName,
    pub(super) key: TransferKey,
    /// Which ranks of the owner and the user have to do with each other, and whether anything is transferred.
    pub(super) pairs: BTreeMap<(usize, usize), bool>,
    pub(super) parts: u32,
    /// How many parts are published with the grant.
    pub(super) at_first: u32,
    /// Whether users are told of the parts by their engine.
    pub(super) handed: bool,
    pub(super) ttl: Duration,
    pub(super) hard: Duration,
    /// Stages at the owner, and at the user.
    pub(super) stages: u8,
    pub(super) before: u8,
    pub(super) after: u8,
    pub(super) prove: Prove,
    /// What each block must hold: of owner's rank, user's rank, part.
    pub(super) tags: BTreeMap<(usize, usize, u32), u32>,
}

impl Job {
    pub(super) fn new(
        setting: &Setting,
        lease: LeaseName,
        next_tag: &mut u32,
        dice: &mut Dice,
    ) -> Self {
        let access = if dice.chance(2, 3) { Access::Read } else { Access::Write };
        let mut pairs = BTreeMap::new();
        for owner in 0..setting.owners {
            for user in 0..setting.users {
                if dice.chance(3, 4) {
                    pairs.insert((owner, user), dice.chance(7, 8));
                }
            }
        }
        // Every rank of the owner hears of somebody.
        for owner in 0..setting.owners {
            if !pairs.keys().any(|(one, _)| *one == owner) {
                pairs.insert((owner, dice.index(setting.users)), false);
            }
        }
        let parts = u32::try_from(dice.among(0, 4)).unwrap_or(0);
        let late = dice.chance(1, 2);
        let at_first =
            if late { u32::try_from(dice.among(0, parts.into())).unwrap_or(0) } else { parts };
        let stages = |dice: &mut Dice| u8::from(dice.chance(1, 3)) + u8::from(dice.chance(1, 8));
        let staged = stages(dice);
        let mut tags = BTreeMap::new();
        for (pair, data) in &pairs {
            for part in 0..parts {
                if *data && dice.chance(7, 8) {
                    *next_tag += 1;
                    tags.insert((pair.0, pair.1, part), *next_tag);
                }
            }
        }
        Self {
            access,
            lease,
            key: key(lease.number),
            pairs,
            parts,
            at_first,
            handed: at_first == parts && staged == 0 && dice.chance(1, 2),
            ttl: setting.ttl,
            hard: setting.hard,
            stages: staged,
            before: stages(dice) * u8::from(dice.chance(1, 2)),
            after: stages(dice),
            prove: if dice.chance(1, 2) { Prove::Whole } else { Prove::EachPart },
            tags,
        }
    }

    /// What its ticket says.
    pub(super) const fn fingerprint(&self) -> Fingerprint {
        Fingerprint((self.lease.number << 32) + self.lease.epoch as u64)
    }

    /// The ranks of the user that confirm at a rank of the owner.
    pub(super) fn readers_of(&self, owner: usize) -> Vec<u16> {
        let of = self.pairs.keys().filter(|(one, _)| *one == owner);
        of.map(|(_, user)| u16::try_from(*user).unwrap_or(u16::MAX)).collect()
    }

    /// Its parts from `from` to before `to`.
    pub(super) fn part_list(&self, from: u32, to: u32) -> Vec<Part> {
        let part =
            |number: u32| Part { number, group: None, layers: number..number + 1, tokens: 0..16 };
        (from..to).map(part).collect()
    }
}

fn key(number: u64) -> TransferKey {
    TransferKey::new(format!("r{number}")).unwrap_or_else(|error| unreachable!("{error}"))
}
