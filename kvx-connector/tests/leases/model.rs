//! The exchange of holds, confirms and releases, in every order: a small world, and all that can happen in it.
//!
//! One rank of an owner, one of a user, the machines themselves. A message that was sent may arrive at any later time, any
//! number of times, or never, whoever lives then. A transfer may copy at any time until it settles. A block that is free
//! holds something else at once. The owner's engine may withdraw and grant anew, or die and begin again with the same numbers;
//! the user's may abort and try again.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use kvx_connector::protocol::message::{Confirm, ToOwner, ToUser};
use kvx_connector::protocol::owner::{self, Grant, Owner};
use kvx_connector::protocol::user::{self, Ask, Outcome, Prove, Source, User};
use kvx_connector::protocol::{
    Access, Attempt, LeaseName, Nonce, Part, Plant, Ranks, Reader, Reason, RequestNumber,
    TransferKey, TransferNumber,
};
use kvx_core::id::Incarnation;

const OWNER: Incarnation = Incarnation::from_bytes([1; 16]);
const USER: Incarnation = Incarnation::from_bytes([2; 16]);
/// When the user gives up, on its clock.
const DEADLINE: Duration = Duration::from_secs(60);

fn life(number: u8) -> Incarnation {
    Incarnation::from_bytes([100 + number; 16])
}

/// How much there is of everything.
#[derive(Clone, Copy)]
struct Size {
    parts: u32,
    attempts: u64,
    ticks: u64,
    withdrawals: u8,
    deaths: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    owner: Owner,
    user: User,
    /// The owner's clock, in seconds.
    ticks: u64,
    to_owner: BTreeSet<ToOwner>,
    /// In order of being sent; none twice.
    to_user: Vec<ToUser>,
    /// Which transfer, of which part, and what it has copied.
    flights: Vec<(TransferNumber, u32, Option<u8>)>,
    /// What the owner's blocks hold, and what the user's do, part by part.
    there: Vec<u8>,
    here: Vec<u8>,
    /// The newest lease, and whether its rank knows of it and has freed it.
    lease: LeaseName,
    granted: bool,
    freed: bool,
    /// What the lease that the user asks for holds.
    wanted: u8,
    asked_for: Option<LeaseName>,
    attempts: u64,
    withdrawals: u8,
    deaths: u8,
    /// Nonces that came in time.
    held: BTreeSet<Nonce>,
    busy: bool,
    late: bool,
}

/// What became of an event.
enum Next {
    State(Box<State>, bool),
    Broken(String),
}

impl State {
    fn new(plant: Option<Plant>, size: Size) -> Self {
        let owner = Self::owner(0, plant);
        let mut config = user::Config::default();
        config.hold_first = Duration::ZERO;
        config.retries = 0;
        let user = User::new(config, 5);
        let user = match plant {
            Some(plant) => user.with_fault(plant),
            None => user,
        };
        let parts = usize::try_from(size.parts).unwrap();
        Self {
            owner,
            user,
            ticks: 0,
            to_owner: BTreeSet::new(),
            to_user: Vec::new(),
            flights: Vec::new(),
            there: vec![1; parts],
            here: vec![0; parts],
            lease: LeaseName { owner: life(0), number: 1, epoch: 0 },
            granted: false,
            freed: false,
            wanted: 1,
            asked_for: None,
            attempts: 0,
            withdrawals: 0,
            deaths: 0,
            held: BTreeSet::new(),
            busy: false,
            late: false,
        }
    }

    fn owner(number: u8, plant: Option<Plant>) -> Owner {
        let mut config = owner::Config::new(life(number));
        // What is remembered outlives the world.
        config.keep_for = Duration::from_secs(1000);
        config.early_for = Duration::from_secs(1000);
        let owner = Owner::new(config);
        match plant {
            Some(plant) => owner.with_fault(plant),
            None => owner,
        }
    }

    fn tell_owner(&mut self, input: owner::Input) -> Result<(), String> {
        let mut out = Vec::new();
        let early = self.held.clone();
        if let owner::Input::Message {
            message: ToOwner::Confirm(Confirm { lease, nonce, .. }), ..
        } = &input
            && *lease == self.lease
            && self.granted
            && !self.freed
        {
            // In time, if it has not expired in this moment.
            self.held.insert(*nonce);
        }
        self.owner.step(Duration::from_secs(self.ticks), input, &mut out);
        self.owner.forget_counts();
        let over = out.iter().position(|output| matches!(output, owner::Output::Over { .. }));
        for (at, output) in out.into_iter().enumerate() {
            match output {
                owner::Output::Send { message, .. } => {
                    if let ToUser::Verdict(verdict) = &message {
                        // What came after the end is told so, after the end.
                        if !verdict.held && over.is_some_and(|over| at > over) {
                            self.held.retain(|nonce| early.contains(nonce));
                        }
                        if !verdict.held && self.held.contains(&verdict.nonce) {
                            return Err("good data is refused".into());
                        }
                        if verdict.held {
                            self.held.insert(verdict.nonce);
                        }
                    }
                    if !self.to_user.contains(&message) {
                        self.to_user.push(message);
                    }
                }
                owner::Output::Free { lease, .. } => {
                    if lease != self.lease || std::mem::replace(&mut self.freed, true) {
                        return Err("a lease is freed twice".into());
                    }
                    self.there.iter_mut().for_each(|tag| *tag = 99);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the request that is asked for was ready.
    fn tell_user(&mut self, input: user::Input) -> Result<bool, String> {
        let now = if self.late { DEADLINE } else { Duration::ZERO };
        let (mut out, mut ready) = (Vec::new(), false);
        self.user.step(now, input, &mut out);
        self.user.forget_counts();
        for output in out {
            match output {
                user::Output::Send { message, .. } => {
                    self.to_owner.insert(message);
                }
                user::Output::Post { transfer, part, .. } => {
                    self.flights.push((transfer, part.number, None));
                }
                user::Output::Ready { .. } => {
                    if self.here.iter().any(|tag| *tag != self.wanted) {
                        return Err("stale data is ready".into());
                    }
                    (ready, self.busy) = (true, false);
                }
                user::Output::PartProven { part, .. }
                    if self.here[part as usize] != self.wanted =>
                {
                    return Err("stale data is proven".into());
                }
                user::Output::Failed { .. } | user::Output::Aborted { .. } => {
                    if !self.flights.is_empty() {
                        return Err("it is over, and something still moves".into());
                    }
                    self.busy = false;
                }
                _ => {}
            }
        }
        Ok(ready)
    }

    /// All that can happen next.
    fn nexts(&self, size: Size, plant: Option<Plant>) -> Vec<Next> {
        let mut nexts = Vec::new();
        let mut may = |change: &dyn Fn(&mut Self) -> Result<bool, String>| {
            let mut next = self.clone();
            nexts.push(match change(&mut next) {
                Ok(ready) => Next::State(Box::new(next), ready),
                Err(broken) => Next::Broken(broken),
            });
        };
        for message in &self.to_owner {
            let input = owner::Input::Message { peer: USER, message: message.clone() };
            may(&|it| it.tell_owner(input.clone()).map(|()| false));
        }
        for message in &self.to_user {
            let input = user::Input::Message { peer: OWNER, message: message.clone() };
            may(&|it| it.tell_user(input.clone()));
        }
        for (at, (transfer, part, copied)) in self.flights.iter().copied().enumerate() {
            let part = part as usize;
            if copied.is_none() {
                may(&|it| {
                    it.flights[at].2 = Some(it.there[part]);
                    it.here[part] = it.there[part];
                    Ok(false)
                });
            } else {
                may(&|it| {
                    it.flights.remove(at);
                    it.tell_user(user::Input::Settled { transfer, outcome: Outcome::Done })
                });
            }
        }
        if self.ticks < size.ticks {
            may(&|it| {
                it.ticks += 1;
                it.tell_owner(owner::Input::Tick).map(|()| false)
            });
        }
        if !self.granted {
            may(&|it| {
                it.granted = true;
                let grant = it.grant(size);
                it.tell_owner(owner::Input::Grant(grant)).map(|()| false)
            });
        }
        if self.granted && !self.freed && self.withdrawals < size.withdrawals {
            may(&|it| {
                it.withdrawals += 1;
                let input = owner::Input::Withdraw { lease: it.lease, why: Reason::Preempted };
                it.tell_owner(input).map(|()| false)
            });
        }
        if self.freed && self.withdrawals > u8::try_from(self.lease.epoch).unwrap() {
            may(&|it| {
                it.lease.epoch += 1;
                (it.granted, it.freed) = (true, false);
                it.there.fill(tag(it.lease));
                let grant = it.grant(size);
                it.tell_owner(owner::Input::Grant(grant)).map(|()| false)
            });
        }
        if self.deaths < size.deaths {
            may(&|it| {
                it.deaths += 1;
                // What the life before has said is nobody's word any more.
                it.held.clear();
                it.owner = Self::owner(it.deaths, plant);
                it.lease = LeaseName { owner: life(it.deaths), number: 1, epoch: 0 };
                (it.granted, it.freed) = (true, false);
                it.there.fill(tag(it.lease));
                let grant = it.grant(size);
                it.tell_owner(owner::Input::Grant(grant)).map(|()| false)
            });
        }
        if !self.busy && self.attempts < size.attempts {
            may(&|it| {
                it.attempts += 1;
                it.busy = true;
                it.ask(size)
            });
        }
        if self.busy && !self.late {
            let request = RequestNumber(self.attempts);
            may(&|it| it.tell_user(user::Input::Abort { request }));
            may(&|it| {
                it.late = true;
                it.tell_user(user::Input::Tick)
            });
        }
        nexts
    }

    fn grant(&self, size: Size) -> Grant {
        Grant {
            lease: self.lease,
            key: TransferKey::new("r").unwrap(),
            access: Access::Read,
            fingerprint: None,
            ttl: Duration::from_secs(2),
            hard: Duration::from_secs(3),
            parts: parts(size),
            total: Some(size.parts),
            stages: 0,
        }
    }

    fn ask(&mut self, size: Size) -> Result<bool, String> {
        // The first attempt's lease, or the newest there is.
        let lease = self.lease;
        self.asked_for = Some(lease);
        self.wanted = tag(lease);
        self.here.iter_mut().for_each(|tag| *tag = 0);
        let ask = Ask {
            request: RequestNumber(self.attempts),
            key: TransferKey::new("r").unwrap(),
            lease,
            access: Access::Read,
            fingerprint: None,
            reader: Reader { attempt: Attempt { user: life(50), number: self.attempts }, rank: 0 },
            sources: vec![Source {
                peer: OWNER,
                set: Ranks::new([0]).unwrap(),
                data: true,
                parts: parts(size),
                total: Some(size.parts),
            }],
            deadline: DEADLINE,
            begin: true,
            prove: if size.parts > 1 { Prove::EachPart } else { Prove::Whole },
            before: 0,
            after: 0,
            keeping: user::Keeping::default(),
        };
        let ready = self.tell_user(user::Input::Ask(ask))?;
        Ok(self.tell_user(user::Input::PeerReady { peer: OWNER })? || ready)
    }

    /// Whether the data is good, and the owner has said so, or must when it is asked.
    fn is_promising(&self) -> bool {
        let asks = |message: &ToOwner| match message {
            ToOwner::Confirm(confirm) => {
                let mine = confirm.reader.attempt.number == self.attempts;
                mine && confirm.last && self.held.contains(&confirm.nonce)
            }
            _ => false,
        };
        let same = self.asked_for.is_some_and(|lease| lease.owner == self.lease.owner);
        self.busy && !self.late && same && self.to_owner.iter().any(asks)
    }
}

/// What a lease's blocks hold: different for each.
fn tag(lease: LeaseName) -> u8 {
    let first = if lease.owner == life(0) { 1 } else { 3 };
    first + u8::from(lease.epoch > 0)
}

fn parts(size: Size) -> Vec<Part> {
    let part = |number| Part { number, group: None, layers: number..number + 1, tokens: 0..16 };
    (0..size.parts).map(part).collect()
}

/// Goes through all states; how many there are, and in how many events it was ready.
fn explore(size: Size, plant: Option<Plant>) -> Result<(usize, usize), String> {
    let first = State::new(plant, size);
    let mut numbers = HashMap::from([(first.clone(), 0_usize)]);
    let mut queue = VecDeque::from([first]);
    let (mut before, mut readies, mut promising) = (vec![Vec::new()], Vec::new(), Vec::new());
    let mut at = 0;
    while let Some(state) = queue.pop_front() {
        if state.is_promising() {
            promising.push(at);
        }
        for next in state.nexts(size, plant) {
            let (next, ready) = match next {
                Next::State(next, ready) => (*next, ready),
                Next::Broken(broken) => return Err(broken),
            };
            if ready {
                readies.push(at);
            }
            let fresh = numbers.len();
            let number = *numbers.entry(next.clone()).or_insert(fresh);
            if number == fresh {
                queue.push_back(next);
                before.push(Vec::new());
            }
            before[number].push(at);
        }
        at += 1;
    }
    // From every state in which the data is good there is a way to be ready.
    let mut can = vec![false; at];
    let mut open = readies.clone();
    while let Some(state) = open.pop() {
        if !std::mem::replace(&mut can[state], true) {
            open.extend(&before[state]);
        }
    }
    match promising.iter().find(|state| !can[**state]) {
        None => Ok((at, readies.len())),
        Some(_) => Err("good data can never be ready".into()),
    }
}

const WHOLE: Size = Size { parts: 1, attempts: 1, ticks: 3, withdrawals: 0, deaths: 0 };
const AGAIN: Size = Size { parts: 1, attempts: 1, ticks: 1, withdrawals: 1, deaths: 1 };
const EACH: Size = Size { parts: 2, attempts: 1, ticks: 2, withdrawals: 0, deaths: 0 };

#[test]
fn no_order_of_events_breaks_the_exchange() {
    for (size, name) in [(WHOLE, "whole"), (AGAIN, "again"), (EACH, "each")] {
        let (states, ready) =
            explore(size, None).unwrap_or_else(|broken| panic!("{name}: {broken}"));
        println!("{name}: {states} states, ready in {ready}");
        assert!(states > 500 && ready > 0, "{name}: hardly anything happens");
    }
}

#[test]
fn the_model_finds_faults_of_the_exchange() {
    let faults = [
        (Plant::VerdictForgotten, WHOLE),
        (Plant::OwnerIgnoresNonce, EACH),
        (Plant::UserIgnoresNonce, EACH),
        (Plant::ClocksCompared, WHOLE),
        (Plant::ConfirmBeforeSettle, WHOLE),
        (Plant::DoubleFreeAtTie, WHOLE),
        (Plant::AbortUnpinsEarly, WHOLE),
    ];
    for (plant, size) in faults {
        match explore(size, Some(plant)) {
            Err(broken) => println!("{plant:?}: {broken}"),
            Ok((states, _)) => panic!("{plant:?} breaks nothing in {states} states"),
        }
    }
}
