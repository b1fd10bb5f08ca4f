//! Any engine: random calls of a scheduler and random reports of its ranks, held against what both were promised.

use std::collections::BTreeSet;

use kvx_tests::strategy;
use proptest::prelude::*;

use super::*;
use crate::ticket::{self, TicketGroup, TransferParams};

const RANKS: u16 = 2;
const OWN: [u32; 2] = [4, 6];
const REMOTE: [u32; 2] = [6, 4];

/// Where a request stands in the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Waiting,
    Loading,
    Running,
}

#[derive(Debug)]
struct Live {
    ask: Ask,
    stage: Stage,
    blocks: Vec<Vec<u32>>,
    computed: u64,
}

/// What a rank was told and has not reported the end of.
#[derive(Debug, Default)]
struct Rank {
    leases: BTreeSet<LeaseName>,
    loads: BTreeSet<u64>,
    reports: u64,
    last: Option<WorkerReport>,
}

struct Engine {
    c: SchedulerConnector,
    now: Duration,
    names: u32,
    live: Vec<Live>,
    ranks: Vec<Rank>,
    tickets: Vec<Map<String, Value>>,
    /// Requests that the engine holds blocks of: to be named as sent, as drained.
    sent: BTreeSet<RequestId>,
    drained: BTreeSet<RequestId>,
    /// What the workers were told, ever.
    expected: BTreeSet<LeaseName>,
    withdrawn: BTreeSet<LeaseName>,
    granted: BTreeMap<LeaseName, RequestId>,
    saved: BTreeMap<LeaseName, (u64, u32)>,
    loads: BTreeMap<u64, Load>,
    bad: BTreeMap<u64, BTreeSet<(u16, u32)>>,
    aborted: BTreeSet<u64>,
    /// How often each lease of a ticket was done with: loaded, aborted or given back.
    closed: BTreeMap<LeaseName, u32>,
}

impl Engine {
    fn new(host_buffer: bool, pool: bool) -> Self {
        let mut config = config("both", &OWN.map(attention));
        config.host_buffer = host_buffer;
        config.pool_blocks = pool.then_some(30);
        config.max_requests = 12;
        Self {
            c: connector(config),
            now: NOW,
            names: 0,
            live: Vec::new(),
            ranks: (0..RANKS).map(|_| Rank::default()).collect(),
            tickets: Vec::new(),
            sent: BTreeSet::new(),
            drained: BTreeSet::new(),
            expected: BTreeSet::new(),
            withdrawn: BTreeSet::new(),
            granted: BTreeMap::new(),
            saved: BTreeMap::new(),
            loads: BTreeMap::new(),
            bad: BTreeMap::new(),
            aborted: BTreeSet::new(),
            closed: BTreeMap::new(),
        }
    }

    fn blocks(&mut self, tokens: u64, sizes: [u32; 2]) -> Vec<Vec<u32>> {
        let base = 1000 * (self.names + 1);
        let ids = |(group, size): (u32, u32)| {
            let first = base + 500 * group;
            (first..).take(usize::try_from(tokens.div_ceil(size.into())).unwrap()).collect()
        };
        (0..).zip(sizes).map(ids).collect()
    }

    /// A ticket of some producer for `tokens` tokens.
    fn ticket(&mut self, tokens: u64) -> Map<String, Value> {
        let tables = self.blocks(tokens, REMOTE).into_iter().map(|ids| Table { first: 0, ids });
        let group =
            |(block_tokens, table)| TicketGroup { kind: GroupKind::Attention, block_tokens, table };
        let lease = LeaseName {
            owner: Incarnation::from_bytes([200; 16]),
            number: self.names.into(),
            epoch: 0,
        };
        let ticket = Ticket {
            key: crate::protocol::TransferKey::new(format!("k{}", self.names)).unwrap(),
            engine: "prefill-9".parse().unwrap(),
            cards: "[::1]:5600".parse().unwrap(),
            replica: 0,
            tp: 1,
            lease,
            access: crate::protocol::Access::Read,
            ttl: Duration::from_secs(30),
            tokens,
            parts: ticket::Parts::Whole,
            groups: REMOTE.into_iter().zip(tables).map(group).collect(),
        };
        self.closed.insert(lease, 0);
        ticket.to_params("p").unwrap()
    }

    fn arrive(&mut self, a: u8, b: u8) {
        self.names += 1;
        let prompt = 1 + u64::from(a % 40);
        let mut params = match b % 8 {
            0 => json!({}),
            1 | 2 => for_decode(),
            3 if !self.tickets.is_empty() => {
                self.tickets[usize::from(a) % self.tickets.len()].clone().into()
            }
            4 => json!({"do_remote_prefill": true, "kvx": {"schema": [1, 1]}}),
            _ => {
                // Perhaps of fewer tokens than the prompt has, or more.
                let tokens = if b & 32 == 0 { prompt } else { 1 + u64::from(b % 40) };
                let ticket = self.ticket(tokens);
                self.tickets.push(ticket.clone());
                ticket.into()
            }
        };
        if b & 64 != 0 {
            params["do_remote_decode"] = true.into();
        }
        let ask = Ask::new(&format!("r{}", self.names), prompt, params);
        if b & 128 != 0 {
            self.c.on_new_request(&ask.request()).unwrap();
        }
        let (stage, blocks) = (Stage::Waiting, Vec::new());
        self.live.push(Live { ask, stage, blocks, computed: 0 });
    }

    fn pick(&self, a: u8, stages: &[Stage]) -> Option<usize> {
        let fit: Vec<_> =
            (0..self.live.len()).filter(|i| stages.contains(&self.live[*i].stage)).collect();
        fit.get(usize::from(a) % fit.len().max(1)).copied()
    }

    fn admit(&mut self, a: u8, b: u8) {
        let Some(at) = self.pick(a, &[Stage::Waiting]) else { return };
        let ask = self.live[at].ask.clone();
        let computed = (u64::from(b % 8) * 3).min(ask.prompt - 1);
        let Some(tokens) = self.c.matched_tokens(&ask.request(), computed).unwrap().tokens() else {
            return;
        };
        assert!(computed + tokens <= ask.prompt);
        if b & 64 != 0 {
            return; // No room: to be asked again.
        }
        self.names += 1;
        let blocks = self.blocks(ask.prompt, OWN);
        let external = if b & 32 == 0 { tokens } else { tokens / 2 };
        let views: Vec<_> = blocks.iter().map(|ids| BlockTable::new(ids)).collect();
        self.c.after_alloc(&ask.id, &views, external).unwrap();
        let live = &mut self.live[at];
        (live.blocks, live.computed) = (blocks, computed);
        live.stage = if external > 0 { Stage::Loading } else { Stage::Running };
    }

    fn step(&mut self, a: u8) {
        let picked = self.pick(a, &[Stage::Running]);
        let live = picked.map(|at| &mut self.live[at]);
        let scheduled: Vec<_> = live
            .into_iter()
            .filter(|live| live.computed < live.ask.prompt)
            .map(|live| {
                let computed = live.computed;
                let tokens = (1 + u64::from(a % 16)).min(live.ask.prompt - computed);
                live.computed += tokens;
                Scheduled { request: &live.ask.id, computed, tokens, appended: &[] }
            })
            .collect();
        let step = self.c.build_step(&scheduled, self.now).unwrap();
        assert!(!self.c.has_pending(self.now));
        let step = {
            let read = StepMetadata::decode(&step.encode().unwrap()).unwrap();
            assert_eq!(read, step);
            read
        };
        self.told(step);
    }

    /// The workers do what a step says, and each thing in it is something that they can do.
    fn told(&mut self, step: StepMetadata) {
        for expect in step.expects {
            assert!(self.expected.insert(expect.lease), "expected twice");
        }
        for save in step.saves {
            assert!(self.expected.contains(&save.lease));
            let saved = self.saved.entry(save.lease).or_default();
            assert_eq!((save.tokens.start, save.part), *saved);
            *saved = (save.tokens.end, save.part + 1);
        }
        for grant in step.grants {
            assert!(self.expected.contains(&grant.lease) && !self.withdrawn.contains(&grant.lease));
            assert_eq!(grant.lease.owner, self.c.incarnation());
            if self.c.config().host_buffer {
                assert_eq!(self.saved[&grant.lease], (grant.tokens, grant.parts));
            }
            assert!(self.granted.insert(grant.lease, grant.request).is_none(), "granted twice");
            self.ranks.iter_mut().for_each(|rank| assert!(rank.leases.insert(grant.lease)));
        }
        for Withdrawal { lease, .. } in step.withdrawals {
            assert!(self.expected.contains(&lease) && self.withdrawn.insert(lease));
        }
        for attempt in step.aborts {
            assert!(self.loads.contains_key(&attempt) && self.aborted.insert(attempt));
            *self.closed.get_mut(&self.loads[&attempt].source.lease).unwrap() += 1;
        }
        for hold in step.holds {
            assert_eq!(self.closed[&hold.source.lease], 0);
        }
        for load in step.loads {
            assert_eq!(self.closed[&load.source.lease], 0);
            assert_eq!(load.replaces.is_some(), self.closed_attempt(&load));
            self.check_map(&load);
            self.ranks.iter_mut().for_each(|rank| assert!(rank.loads.insert(load.attempt)));
            assert!(self.loads.insert(load.attempt, load).is_none(), "an attempt twice");
        }
        for release in step.releases {
            *self.closed.get_mut(&release.source.lease).unwrap() += 1;
        }
    }

    /// Whether the load takes the place of one that all ranks have ended.
    fn closed_attempt(&self, load: &Load) -> bool {
        let replaced = load.replaces.and_then(|attempt| self.loads.get(&attempt));
        replaced.is_some_and(|before| {
            assert_eq!((&before.tokens, &before.local), (&load.tokens, &load.local));
            assert!(self.ranks.iter().all(|rank| !rank.loads.contains(&before.attempt)));
            true
        })
    }

    /// Every token of a load is in one block on either side: the one that holds it.
    fn check_map(&self, load: &Load) {
        let live = self.live.iter().find(|live| live.ask.id == load.request).unwrap();
        let whole = TransferParams::from_json(&live.ask.params).unwrap().ticket.unwrap();
        let at = |table: &Table, size: u32, token: u64| {
            let block = token / u64::from(size);
            block
                .checked_sub(table.first)
                .and_then(|at| table.ids.get(usize::try_from(at).unwrap()))
                .copied()
        };
        for token in load.tokens.clone() {
            for group in 0..2 {
                let own = Table { first: 0, ids: live.blocks[group].clone() };
                let local = at(&load.local[group], OWN[group], token);
                assert!(local.is_some() && local == at(&own, OWN[group], token));
                let remote = at(&load.remote[group].table, REMOTE[group], token);
                let theirs = &whole.groups[group].table;
                assert!(remote.is_some() && remote == at(theirs, REMOTE[group], token));
            }
        }
        for (table, size) in load.local.iter().zip(OWN) {
            let blocks = load.tokens.start / u64::from(size)..load.tokens.end.div_ceil(size.into());
            assert_eq!(table.ids.len() as u64, blocks.end - blocks.start);
        }
    }

    fn finish(&mut self, a: u8, b: u8) {
        let all = [Stage::Waiting, Stage::Loading, Stage::Running];
        let Some(at) = self.pick(a, &all) else { return };
        let mut live = self.live.remove(at);
        if live.stage == Stage::Running && b & 16 == 0 {
            live.computed = live.ask.prompt;
        }
        if live.stage == Stage::Waiting && b & 64 != 0 {
            self.c.rejected(&live.ask.request());
            return;
        }
        let complete = live.stage == Stage::Running && live.computed == live.ask.prompt;
        let status = match b % 4 {
            0 | 1 if complete => FinishStatus::LengthCapped,
            2 if complete => FinishStatus::Stopped,
            _ => FinishStatus::Aborted,
        };
        let views: Vec<_> = live.blocks.iter().map(|ids| BlockTable::new(ids)).collect();
        let finishing = Finishing { status, tokens: live.computed, blocks: &views };
        let finished = self.c.request_finished(&live.ask.request(), &finishing).unwrap();
        let drains = self.drained.contains(&live.ask.id);
        if finished.hold && finished.params.is_some() {
            assert_eq!(status, FinishStatus::LengthCapped);
            assert!(self.sent.insert(live.ask.id.clone()));
        } else if finished.hold && !drains {
            assert_eq!(live.stage, Stage::Loading);
            assert!(self.drained.insert(live.ask.id.clone()));
        } else {
            assert_eq!(finished.hold, drains);
        }
        if finished.hold && b & 128 != 0 {
            // Aborted all the same, perhaps twice.
            let aborting = Finishing { status: FinishStatus::Aborted, ..finishing };
            for _ in 0..=b % 2 {
                let again = self.c.request_finished(&live.ask.request(), &aborting).unwrap();
                assert_eq!(again, Finished { hold: true, params: None });
            }
        }
    }

    fn preempt(&mut self, a: u8) {
        let Some(at) = self.pick(a, &[Stage::Loading, Stage::Running]) else { return };
        let live = &mut self.live[at];
        if self.c.preempted(&live.ask.id) {
            assert_eq!(live.stage, Stage::Loading);
            assert!(self.drained.insert(live.ask.id.clone()));
        }
        (live.stage, live.computed) = (Stage::Waiting, 0);
    }

    /// A rank reports some of what it may, or what it reported last once more.
    fn report(&mut self, rank: u16, a: u8, b: u8, all: bool) {
        let own = &mut self.ranks[usize::from(rank)];
        if let Some(last) = own.last.clone().filter(|_| !all && b.is_multiple_of(5)) {
            assert!(self.c.update(rank, &last, self.now).unwrap().is_empty());
            return;
        }
        own.reports += 1;
        let mut report = WorkerReport::new(self.c.incarnation(), own.reports);
        let some = |i: &usize| all || (a >> (i % 8)) & 1 == 1;
        for (_, lease) in own.leases.iter().enumerate().filter(|(i, _)| some(i)) {
            let why = match b % 3 {
                0 => Reason::Done,
                1 => Reason::Expired,
                _ => Reason::Aborted,
            };
            report.ended.push(LeaseEnd { lease: *lease, why });
        }
        for (i, attempt) in own.loads.iter().enumerate().filter(|(i, _)| some(i)) {
            let outcome = match (b >> (i % 4)) % 8 {
                0 if self.aborted.contains(attempt) => LoadOutcome::Aborted,
                0..=3 => LoadOutcome::Loaded,
                4..=6 => LoadOutcome::Retry,
                _ => LoadOutcome::Failed,
            };
            let mut end = LoadEnd::new(*attempt, outcome, "");
            let load = &self.loads[attempt];
            if outcome != LoadOutcome::Loaded {
                // Not the same at each rank.
                let bad = load.local[usize::from(rank)].ids.iter().take(1);
                end.blocks = bad.map(|id| (rank, *id)).collect();
                self.bad.entry(*attempt).or_default().extend(&end.blocks);
            }
            report.loads.push(end);
        }
        for end in &report.ended {
            own.leases.remove(&end.lease);
        }
        for end in &report.loads {
            own.loads.remove(&end.attempt);
        }
        let report = WorkerReport::decode(&report.encode().unwrap()).unwrap();
        let updates = self.c.update(rank, &report, self.now).unwrap();
        own.last = Some(report);
        self.updated(updates);
    }

    /// The engine does what it is told, and only what it waits for is said, and only once all ranks have said it.
    fn updated(&mut self, updates: Updates) {
        for request in updates.sent {
            assert!(self.sent.remove(&request), "{request} was not held");
            let mut leases = self.granted.iter().filter(|(_, by)| **by == request);
            assert!(
                leases.all(|(lease, _)| self.ranks.iter().all(|it| !it.leases.contains(lease)))
            );
        }
        for request in updates.drained {
            assert!(self.drained.remove(&request), "{request} was not held");
            self.assert_settled(&request);
        }
        for received in updates.received {
            let load = self.assert_settled(&received.request);
            assert!(!self.bad.contains_key(&load.attempt));
            *self.closed.get_mut(&load.source.lease).unwrap() += 1;
            self.go_on(&received.request, received.computed);
        }
        for failed in updates.failed {
            let load = self.assert_settled(&failed.request);
            assert_eq!(failed.blocks, self.bad[&load.attempt]);
            assert!(failed.computed <= load.tokens.end);
            self.go_on(&failed.request, failed.computed);
        }
        assert!(updates.quarantined.is_empty());
    }

    /// The last load of a request: it has ended at all ranks.
    fn assert_settled(&self, request: &RequestId) -> Load {
        let load = self.loads.values().rfind(|load| load.request == *request).unwrap();
        assert!(self.ranks.iter().all(|rank| !rank.loads.contains(&load.attempt)));
        load.clone()
    }

    fn go_on(&mut self, request: &RequestId, computed: u64) {
        let live = self.live.iter_mut().find(|live| live.ask.id == *request).unwrap();
        assert_eq!(live.stage, Stage::Loading);
        (live.stage, live.computed) = (Stage::Running, computed);
    }

    fn act(&mut self, (what, a, b): (u8, u8, u8)) {
        match what {
            0 | 1 => self.arrive(a, b),
            2 | 3 => self.admit(a, b),
            4 | 5 => self.step(a),
            6 => self.finish(a, b),
            7 => self.preempt(a),
            8 => self.now += Duration::from_millis(a.into()),
            _ => self.report(u16::from(b) % RANKS, a, b / 2, false),
        }
    }

    /// Everything is finished and reported: nothing is left.
    fn end(&mut self) {
        while !self.live.is_empty() {
            self.finish(0, 3);
        }
        for _ in 0..3 {
            self.step(0);
            (0..RANKS).for_each(|rank| self.report(rank, 0, 0, true));
        }
        assert!(
            self.sent.is_empty() && self.drained.is_empty(),
            "{:?} {:?}",
            self.sent,
            self.drained
        );
        self.c.assert_idle();
    }
}

proptest! {
    #![proptest_config(strategy::config())]

    #[test]
    fn whatever_an_engine_does_nothing_leaks_and_nothing_is_freed_early(
        host_buffer: bool,
        pool: bool,
        acts in proptest::collection::vec((0..13_u8, any::<u8>(), any::<u8>()), 0..150),
    ) {
        let mut engine = Engine::new(host_buffer, pool);
        for act in acts {
            engine.act(act);
        }
        engine.end();
        for (lease, closed) in &engine.closed {
            // A ticket that no connector was shown is nobody's; any other is loaded, aborted or given back, once.
            prop_assert_eq!(*closed, 1, "{}", lease);
        }
    }
}
