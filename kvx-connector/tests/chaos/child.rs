//! An engine in a process of its own: does what it is told, and says what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, Write as _};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_connector::control::Key;
use kvx_connector::protocol::{LeaseName, Plant, Reason};
use kvx_connector::rank::{RankEvent, RankSetup};
use kvx_connector::ticket::{Table, Ticket};
use kvx_connector::worker::{Fetched, Fetching, Granted};
use kvx_core::ErrorKind;
use kvx_core::backend::TransferBackend;
use kvx_core::layout::NamedLayout::{FlashAttentionHnd, FlashAttentionNhd};

use crate::cache::{BLOCK, EMPTY, FREE, blocks};
use crate::held::Held;
use crate::node::{Node, Recipe};
use crate::poll_once;
use crate::words::{Count, Ended, How, Order, Said, Setup};

/// Set, to its setup, in the environment of a process that is to be an engine.
pub(crate) const ENGINE: &str = "KVX_CHAOS_ENGINE";

/// What begins a line that is meant for the supervisor.
pub(crate) const MARK: &str = "@ ";

/// The engine, if this process was started to be one.
#[test]
fn engine() {
    let Ok(setup) = std::env::var(ENGINE) else { return };
    let setup: Setup = serde_json::from_str(&setup).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let order = serde_json::from_str(&line.unwrap()).unwrap();
            if sender.send(order).is_err() {
                return;
            }
        }
        // Whoever started it is gone.
        let _ended = sender.send(Order::Stop);
    });
    let before = count(None);
    let held = Mutex::new(Vec::new());
    let node = runtime.block_on(start(&setup, &held));
    say(&Said::Up { listens: node.listens.iter().map(ToString::to_string).collect() });
    let held = held.into_inner().unwrap();
    let mut engine = Engine::new(node, held, &setup);
    engine.serve(&orders);
    engine.look_at(&engine.free);
    drop(engine);
    // A backend that is dropped ends without being waited for.
    let until = Instant::now() + Duration::from_secs(5);
    let mut after = count(None);
    while !after.is_no_more_than(&before) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
        after = count(None);
    }
    say(&Said::Stopped { before, after });
}

async fn start(setup: &Setup, held: &Mutex<Vec<Arc<Held>>>) -> Node {
    let key = Key::from_bytes(setup.key);
    let layout = if setup.heads_first { FlashAttentionHnd } else { FlashAttentionNhd };
    let mut recipe = Recipe::new(&setup.name, &key, layout, setup.tp, setup.blocks);
    recipe.backend.clone_from(&setup.backend);
    recipe.options.clone_from(&setup.options);
    recipe.listen = setup.listen.parse().unwrap();
    recipe.advertised = setup.advertised.iter().map(|it| it.parse().unwrap()).collect();
    // A peer that says nothing for 0.4 s is taken to be gone.
    recipe.limits.ping_after = Duration::from_millis(100);
    recipe.limits.half_open_for = Duration::from_secs(1);
    let wrap = |backend| -> Arc<dyn TransferBackend> {
        if setup.slow == 0 {
            return backend;
        }
        let one = Held::new(backend);
        held.lock().unwrap().push(Arc::clone(&one));
        one
    };
    let named = |plant: &Plant| setup.plant.as_ref().is_some_and(|it| *it == format!("{plant:?}"));
    let plant = Plant::ALL.into_iter().find(named);
    let tune = |setup: &mut RankSetup| {
        hasten(setup);
        setup.plant = plant;
    };
    Node::start(&recipe, wrap, tune).await
}

/// Short times, so that much happens in a second.
fn hasten(setup: &mut RankSetup) {
    setup.user.hold_every = Duration::from_millis(100);
    setup.user.hold_first = Duration::from_millis(5);
    setup.user.grace = Duration::from_millis(300);
    setup.peers.attempt = Duration::from_secs(1);
    setup.peers.again = Duration::from_millis(200);
    setup.peers.longest_pause = Duration::from_millis(200);
    setup.peers.alone = Duration::from_millis(300);
    setup.peers.refusal = Duration::from_millis(500);
}

struct Lease {
    name: LeaseName,
    table: Table,
    granted: Vec<Granted>,
    whys: BTreeSet<String>,
}

struct Reading {
    request: u64,
    table: Table,
    range: Range<u64>,
    open: Vec<Fetching>,
    ended: Vec<Fetched>,
    begun: Instant,
    /// Ranks that have not said that nothing moves any more, though it is over.
    kept: isize,
}

struct Engine {
    node: Node,
    held: Vec<Arc<Held>>,
    slow: u32,
    free: Vec<u32>,
    leases: BTreeMap<u64, Lease>,
    readings: BTreeMap<u64, Reading>,
    next: u64,
}

impl Engine {
    fn new(node: Node, held: Vec<Arc<Held>>, setup: &Setup) -> Self {
        let free: Vec<u32> = (0..setup.blocks).collect();
        free.iter().for_each(|id| empty(&node, *id));
        let (leases, readings) = Default::default();
        Self { node, held, slow: setup.slow, free, leases, readings, next: 1 }
    }

    fn serve(&mut self, orders: &Receiver<Order>) {
        let pause = Duration::from_millis(self.slow.into());
        let mut next = Instant::now();
        loop {
            match orders.recv_timeout(Duration::from_millis(1)) {
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= next {
                self.held.iter().for_each(|held| held.go_on());
                next = Instant::now() + pause;
            }
            self.look();
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Publish { request, tokens, ttl_ms, hard_ms } => {
                let Some(table) = self.take(tokens) else {
                    return say(&Said::Full { number: request });
                };
                self.node.cache.fill(&table, 0..tokens, request);
                let times = (Duration::from_millis(ttl_ms), Duration::from_millis(hard_ms));
                let (ticket, granted) = self.node.publish(self.next, tokens, &table, times);
                self.next += 1;
                let lease = Lease { name: ticket.lease, table, granted, whys: BTreeSet::new() };
                self.leases.insert(request, lease);
                let ticket = ticket.to_bytes().unwrap();
                let ticket = ticket.iter().map(|byte| format!("{byte:02x}")).collect();
                say(&Said::Ticket { request, ticket });
            }
            Order::Withdraw { request } => {
                if let Some(lease) = self.leases.get(&request) {
                    for worker in &self.node.workers {
                        worker.withdraw(lease.name, Reason::Aborted);
                    }
                }
            }
            Order::Fetch { attempt, request, ticket, from, deadline_ms } => {
                let byte = |at| u8::from_str_radix(&ticket[at..at + 2], 16).unwrap();
                let ticket: Vec<u8> = (0..ticket.len()).step_by(2).map(byte).collect();
                let ticket = Ticket::from_bytes(&ticket).unwrap();
                let Some(table) = self.take(ticket.tokens) else {
                    return say(&Said::Full { number: attempt });
                };
                self.node.cache.fill(&table, tokens_of(&table), EMPTY);
                let (range, begun) = (from..ticket.tokens, Instant::now());
                let deadline = Duration::from_millis(deadline_ms);
                let open = self.node.fetch(attempt, &ticket, range.clone(), &table, deadline);
                let ended = Vec::new();
                let reading = Reading { request, table, range, open, ended, begun, kept: 0 };
                self.readings.insert(attempt, reading);
            }
            Order::Abort { attempt } => {
                if let Some(reading) = self.readings.get(&attempt) {
                    reading.open.iter().for_each(Fetching::abort);
                }
            }
            Order::Count => say(&Said::Counted(count(Some(&self.node)))),
            Order::Stop => {}
        }
    }

    /// Blocks for so many tokens. That nobody has written into them since they were free is looked at.
    fn take(&mut self, tokens: u64) -> Option<Table> {
        let count = usize::try_from(blocks(tokens)).unwrap();
        let rest = self.free.len().checked_sub(count)?;
        let table = Table { first: 0, ids: self.free.split_off(rest) };
        self.look_at(&table.ids);
        Some(table)
    }

    /// Says so where somebody has written into free blocks.
    fn look_at(&self, ids: &[u32]) {
        let runs = ids.iter().map(|id| spoilt(&self.node, *id)).sum();
        if runs > 0 {
            say(&Said::Spoilt { blocks: ids.to_vec(), runs });
        }
    }

    /// Blocks are free: whatever was in them is overwritten at once, and those that were free longest are taken next.
    fn give(&mut self, table: Table) {
        table.ids.iter().for_each(|id| empty(&self.node, *id));
        self.free.splice(0..0, table.ids);
    }

    /// Looks at what has happened.
    fn look(&mut self) {
        let mut freed = Vec::new();
        for (request, lease) in &mut self.leases {
            lease.granted.retain_mut(|granted| match granted.try_ended().unwrap() {
                Some(why) => {
                    lease.whys.insert(format!("{why:?}"));
                    false
                }
                None => true,
            });
            if lease.granted.is_empty() {
                freed.push(*request);
            }
        }
        for request in freed {
            let lease = self.leases.remove(&request).unwrap();
            self.give(lease.table);
            say(&Said::Freed { request, whys: lease.whys.into_iter().collect() });
        }
        let mut over = Vec::new();
        for (attempt, reading) in &mut self.readings {
            let before = reading.open.len();
            for mut fetching in std::mem::take(&mut reading.open) {
                match poll_once(&mut fetching) {
                    Some(ended) => reading.ended.push(ended),
                    None => reading.open.push(fetching),
                }
            }
            if before > 0 && reading.open.is_empty() {
                over.push(*attempt);
            }
        }
        for attempt in over {
            let reading = &self.readings[&attempt];
            let ended = self.ended(attempt, reading);
            say(&Said::Ended(ended));
            let quarantined = |it: &&Fetched| it.as_ref().is_err_and(|failed| failed.quarantined);
            let kept = isize::try_from(reading.ended.iter().filter(quarantined).count()).unwrap();
            // Of some it may have been said before that they are quiet.
            self.readings.get_mut(&attempt).unwrap().kept += kept;
            self.give_if_quiet(attempt, kept > 0);
        }
        let events = self.node.workers.iter().flat_map(|worker| worker.take_events());
        for event in events.collect::<Vec<_>>() {
            let RankEvent::Unquarantined { request } = event else { continue };
            let Some(reading) = self.readings.get_mut(&request.0) else { continue };
            reading.kept -= 1;
            self.give_if_quiet(request.0, true);
        }
    }

    /// Uses the blocks of an attempt again, once it is over and nothing moves in them.
    fn give_if_quiet(&mut self, attempt: u64, tell: bool) {
        let quiet = |reading: &Reading| reading.open.is_empty() && reading.kept == 0;
        if self.readings.get(&attempt).is_some_and(quiet) {
            let reading = self.readings.remove(&attempt).unwrap();
            self.give(reading.table);
            if tell {
                say(&Said::Quiet { attempt });
            }
        }
    }

    fn ended(&self, attempt: u64, reading: &Reading) -> Ended {
        let Reading { table, range, .. } = reading;
        let cache = &self.node.cache;
        let asked = usize::try_from(range.start / u64::from(BLOCK)).unwrap();
        let asked: BTreeSet<(u16, u32)> = table.ids[asked..].iter().map(|id| (0, *id)).collect();
        let mut named = BTreeSet::new();
        let (mut how, mut error) = (How::Ready, String::new());
        let mut quarantined = false;
        for failed in reading.ended.iter().filter_map(|ended| ended.as_ref().err()) {
            let aborted = failed.error.kind() == ErrorKind::Closed;
            if how != How::Failed {
                how = if aborted { How::Aborted } else { How::Failed };
                error = failed.to_string();
            }
            named.extend(failed.blocks.iter().copied());
            quarantined |= failed.quarantined;
        }
        // The rest of the last block may be moved with it.
        let outside = if quarantined { 0 } else { cache.wrong(table, 0..range.start, EMPTY) };
        Ended {
            attempt,
            how,
            wrong: match how {
                How::Ready => cache.wrong(table, range.clone(), reading.request),
                _ => 0,
            },
            outside,
            all_named: how != How::Failed || named == asked,
            quarantined,
            elapsed_ms: u64::try_from(reading.begun.elapsed().as_millis()).unwrap(),
            error,
        }
    }
}

/// Overwrites a block with what is in those that are free.
fn empty(node: &Node, id: u32) {
    let one = Table { first: 0, ids: vec![id] };
    node.cache.fill(&one, tokens_of(&one), FREE);
}

/// How many runs of bytes of a block are not what is in those that are free.
fn spoilt(node: &Node, id: u32) -> u64 {
    let one = Table { first: 0, ids: vec![id] };
    node.cache.wrong(&one, tokens_of(&one), FREE)
}

fn tokens_of(table: &Table) -> Range<u64> {
    0..table.ids.len() as u64 * u64::from(BLOCK)
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).unwrap();
    let mut output = std::io::stdout().lock();
    // Whoever started it may be gone.
    let _gone = writeln!(output, "{MARK}{line}").and_then(|()| output.flush());
}

/// What this process holds.
fn count(node: Option<&Node>) -> Count {
    let entries = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let workers = || node.into_iter().flat_map(|node| &node.workers);
    let peers: Vec<_> = workers().flat_map(|worker| worker.peers()).collect();
    let sessions = peers.iter().map(|peer| peer.sessions).sum();
    Count {
        descriptors: entries("fd") - sessions,
        sessions,
        threads: entries("task"),
        shared: maps.lines().filter(|line| line.contains("memfd")).count(),
        kib: anonymous.trim().trim_end_matches(" kB").parse().unwrap(),
        leases: workers().map(|worker| worker.open().0).sum(),
        fetches: workers().map(|worker| worker.open().1).sum(),
        peers: peers.len(),
    }
}
