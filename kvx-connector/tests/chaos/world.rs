//! One replay: engines in processes, requests from a trace, faults, and what must hold of it all.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvx_connector::protocol::Plant;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::fault::{self, CONSUMER, Fault, Kind, PRODUCER};
use crate::filter;
use crate::ledger::{Ledger, Tally};
use crate::process::{Process, Who};
use crate::proxy::Proxy;
use crate::trace::{self, Entry, Fate};
use crate::words::{Count, How, Order, Said, Setup};

mod after;
mod course;

/// How long a process may take to start, and all that is under way to be over once nothing goes wrong any more.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Numbers of attempts are the numbers of their requests, and this or twice this more.
const ATTEMPT: u64 = 1 << 32;

/// How replays are run.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) backend: &'static str,
    pub(crate) options: Vec<(String, String)>,
    /// What goes wrong.
    pub(crate) kinds: &'static [Kind],
    /// A fault of the protocol in all engines.
    pub(crate) plant: Option<Plant>,
    /// Packets are dropped, and no proxies are between the engines.
    pub(crate) filtered: bool,
}

impl Setting {
    pub(crate) const fn new(backend: &'static str, kinds: &'static [Kind]) -> Self {
        Self { backend, options: Vec::new(), kinds, plant: None, filtered: false }
    }
}

/// A place for a process.
struct Slot {
    setup: Setup,
    life: u32,
    process: Option<Process>,
    /// What it held when it was warm, if it is still the same process.
    warm: Option<Count>,
    counted: Option<Count>,
    up: bool,
    stopped: Option<(Count, Count)>,
}

#[derive(Clone, Debug)]
enum Act {
    Publish(usize),
    Withdraw(u64),
    Abort(u64),
    Begin(Fault),
    End(Fault),
}

/// What is between a producer's ranks and others: one for each.
type Proxies = Vec<Proxy>;

pub(crate) struct World {
    slots: Vec<Slot>,
    proxies: Vec<Proxies>,
    sender: Sender<(Who, Said)>,
    reports: Receiver<(Who, Said)>,
    trace: Vec<Entry>,
    tickets: BTreeMap<u64, String>,
    acts: BTreeMap<(Instant, u64), Act>,
    number: u64,
    ledger: Ledger,
    chance: ChaCha8Rng,
    /// How long processes have stood still.
    still: Duration,
    filter: Option<filter::Filter>,
    pub(crate) said: Vec<String>,
    begun: Instant,
}

impl World {
    /// Runs the replay of a seed. An error is what must not be, line by line.
    pub(crate) fn run(seed: u64, how: &Setting) -> Result<(Tally, String), String> {
        let mut world = Self::new(seed, how);
        let faults = fault::draw(seed, how.kinds, how.filtered, &mut world.chance);
        let what = format!("seed {seed}: {} {faults:?}", world.shape());
        world.warm();
        if world.ledger.wrong.is_empty() {
            world.replay(&faults);
            world.recover();
            world.compare();
            let of_consumer = |fault: &Fault| {
                matches!(fault, Fault::Kill(CONSUMER, _) | Fault::Stop(CONSUMER, _))
            };
            if world.slots.len() > 2 && !faults.iter().any(|(_, fault)| of_consumer(fault)) {
                world.ledger.count_other(PRODUCER + 1);
            }
            world.end();
        }
        match world.ledger.wrong.as_slice() {
            [] => Ok((world.ledger.tally, what)),
            wrong => {
                let last = world.said.len().saturating_sub(60);
                let said = world.said[last..].join("\n");
                Err(format!("{what}\nlast:\n{said}\nwrong:\n{}", wrong.join("\n")))
            }
        }
    }

    fn new(seed: u64, how: &Setting) -> Self {
        let mut chance = ChaCha8Rng::seed_from_u64(seed);
        let producers = if seed.is_multiple_of(3) { 2 } else { 1 };
        let slow = chance.random_ratio(1, 2);
        let key = chance.random();
        let (mut slots, mut proxies) = (Vec::new(), Vec::new());
        for index in 0..=producers {
            let tp = chance.random_range(1..=2);
            let direct = index == CONSUMER || how.filtered;
            let ranks: Vec<Proxy> =
                (0..if direct { 0 } else { tp }).map(|_| Proxy::start(chance.random())).collect();
            let setup = Setup {
                name: ["decode", "prefill-1", "prefill-2"][index].to_owned(),
                key,
                tp,
                heads_first: chance.random_ratio(1, 2),
                blocks: 800,
                backend: how.backend.to_owned(),
                options: how.options.clone(),
                listen: format!("127.0.0.{}:0", 1 + index),
                advertised: ranks.iter().map(|proxy| proxy.address.to_string()).collect(),
                plant: how.plant.map(|plant| format!("{plant:?}")),
                slow: if slow && index == CONSUMER { chance.random_range(3..25) } else { 0 },
            };
            let (warm, counted, stopped) = (None, None, None);
            slots.push(Slot { setup, life: 0, process: None, warm, counted, up: false, stopped });
            proxies.push(ranks);
        }
        let trace = trace::draw(&mut chance);
        let (sender, reports) = channel();
        Self {
            slots,
            proxies,
            sender,
            reports,
            trace,
            tickets: BTreeMap::new(),
            acts: BTreeMap::new(),
            number: 0,
            ledger: Ledger::default(),
            chance,
            still: Duration::ZERO,
            filter: how.filtered.then(filter::Filter::new),
            said: Vec::new(),
            begun: Instant::now(),
        }
    }

    fn shape(&self) -> String {
        let slots =
            self.slots.iter().map(|slot| format!("{} tp {}", slot.setup.name, slot.setup.tp));
        let slow = match self.slots[CONSUMER].setup.slow {
            0 => String::new(),
            turns => format!(", slow {turns}"),
        };
        format!("{}{slow}", slots.collect::<Vec<_>>().join(", "))
    }

    fn producers(&self) -> std::ops::Range<usize> {
        PRODUCER..self.slots.len()
    }

    fn start(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.life += 1;
        let process = Process::start(&slot.setup, (index, slot.life), self.sender.clone());
        slot.process = Some(process);
    }

    fn kill(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        (slot.warm, slot.up) = (None, false);
        if let Some(mut process) = slot.process.take() {
            process.kill();
            self.ledger.died((index, slot.life));
        }
        self.proxies[index].iter().for_each(|proxy| proxy.lead_to(None));
    }

    fn tell(&self, index: usize, order: &Order) {
        let slot = &self.slots[index];
        if let Some(process) = slot.process.as_ref().filter(|_| slot.up) {
            process.tell(order);
        }
    }

    fn at(&mut self, when: Instant, act: Act) {
        self.number += 1;
        self.acts.insert((when, self.number), act);
    }

    /// Hears what is said until then, or until `enough`. Returns whether that is so.
    fn wait(&mut self, until: Instant, enough: impl Fn(&Self) -> bool) -> bool {
        loop {
            if enough(self) {
                return true;
            }
            let next = self.acts.first_key_value().map(|((at, _), _)| *at);
            let now = Instant::now();
            if let Some(at) = next
                && at <= now
                && at < until
            {
                let (_, act) = self.acts.pop_first().unwrap();
                self.act(act);
                continue;
            }
            if until <= now {
                return false;
            }
            let left = next.map_or(until, |at| at.min(until)).saturating_duration_since(now);
            if let Ok((who, said)) = self.reports.recv_timeout(left) {
                self.hear(who, said);
            }
        }
    }

    fn note(&mut self, what: &str) {
        self.said.push(format!("{:?} {what}", self.begun.elapsed()));
    }

    fn hear(&mut self, who: Who, said: Said) {
        let brief = |said: &Said| match said {
            Said::Ticket { request, .. } => format!("{who:?}: ticket {request}"),
            other => format!("{who:?}: {other:?}"),
        };
        if !matches!(said, Said::Counted(_)) {
            self.note(&brief(&said));
        }
        let slot = &mut self.slots[who.0];
        let current = slot.life == who.1 && slot.process.is_some();
        match said {
            Said::Up { listens } if current => {
                slot.up = true;
                for (proxy, listens) in self.proxies[who.0].iter().zip(listens) {
                    proxy.lead_to(Some(listens.parse().unwrap()));
                }
            }
            Said::Ticket { request, ticket } => {
                let fate = self.trace[usize::try_from(request).unwrap() - 1].fate;
                self.tickets.insert(request, ticket);
                if let Fate::Withdrawn(soon) = fate {
                    self.at(Instant::now() + soon, Act::Withdraw(request));
                }
                if fate != Fate::Unread {
                    self.fetch(request + ATTEMPT, request);
                }
            }
            Said::Full { number } => self.ledger.full(number),
            Said::Freed { request, whys } => self.ledger.freed(request, whys),
            Said::Ended(ended) => {
                let (attempt, how) = (ended.attempt, ended.how);
                self.ledger.ended(ended, self.still);
                // Once more, while it is perhaps still there.
                if how == How::Failed && attempt < 2 * ATTEMPT {
                    self.fetch(attempt + ATTEMPT, attempt - ATTEMPT);
                }
            }
            Said::Quiet { attempt } => self.ledger.quiet(attempt),
            Said::Spoilt { .. } => self.ledger.wrong.push(format!("{who:?}: {said:?}")),
            Said::Counted(count) if current => slot.counted = Some(count),
            Said::Stopped { before, after } if current => slot.stopped = Some((before, after)),
            Said::Up { .. } | Said::Counted(_) | Said::Stopped { .. } => {}
        }
    }
}
