//! What engines do in the exchange, step by step.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::capability::Revoke;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use super::checker::{Checker, LifeId, Seen};
use super::exchange::{Exchange, Report};
use super::flight::Posted;
use super::seat::{Alive, Link, REGION_BYTES, SLOT_BYTES, SLOTS, Seat, slot, tag};
use super::violation::{Violation, ensure};
use super::weather::Weather;
use super::{Purpose, stream};
use crate::fabric::Fabric;
use crate::rule::Kind;

type Verdict<T = ()> = Result<T, Violation>;

/// When all faults have ended, everything is over after this much virtual time: the longest silence of a preset, and what
/// severing takes.
const QUIET_WITHIN: Duration = Duration::from_secs(40);

/// And after this many rounds in which everything happens that will, and everybody polls all that there is.
const QUIET_ROUNDS: u32 = 1000;

/// More polls than that, while nothing else is done, are never needed to hear everything.
const QUIET_POLLS: u32 = 100_000;

/// A run.
pub(super) struct World<'a> {
    fabric: Fabric,
    exchange: Exchange<'a>,
    checker: Checker,
    weather: Weather,
    seats: Vec<Seat>,
    rng: ChaCha8Rng,
    next_id: u64,
    next_tag: u64,
    /// When in the weather each transfer was posted, and to whom.
    posts: BTreeMap<TransferId, (u64, Arc<str>)>,
    /// Every key that was ever made, and whose.
    keys: Vec<(LifeId, KeyBlob)>,
    report: Report,
}

/// An error that the scenario did not expect.
fn wrong(what: &str) -> impl Fn(Error) -> Violation + '_ {
    move |error| Violation::new(format!("{what}: {error}"))
}

/// Runs something asynchronous that must not have to wait.
fn at_once<T>(what: &str, future: impl Future<Output = T>) -> Verdict<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Ok(value),
        Poll::Pending => Err(Violation::new(format!("{what} waits"))),
    }
}

impl<'a> World<'a> {
    pub(super) fn run(fabric: &Fabric, exchange: Exchange<'a>) -> Verdict<Report> {
        let names = ["p0", "p1", "c0", "c1"].map(Arc::<str>::from);
        let report = Report {
            fabric: fabric.clone(),
            posted: 0,
            refused: 0,
            done: 0,
            undone: 0,
            notified: 0,
            downs: 0,
            killed: 0,
        };
        let mut world = Self {
            fabric: fabric.clone(),
            checker: Checker::new(exchange.preset.capabilities().clone()),
            weather: Weather::new(fabric, &names),
            seats: names.map(|name| Seat { name, alive: None }).into(),
            rng: stream(exchange.seed, Purpose::Script),
            next_id: 1,
            posts: BTreeMap::new(),
            keys: Vec::new(),
            next_tag: exchange.seed << 20,
            exchange,
            report,
        };
        if world.exchange.seed % 8 == 5 {
            world.weather.every_rule();
        }
        for seat in 0..world.seats.len() {
            world.open(seat)?;
        }
        for one in 0..world.seats.len() {
            for other in 0..one {
                world.meet(one, other)?;
            }
        }
        for _ in 0..world.exchange.steps {
            world.step()?;
            world.checker.check()?;
        }
        world.quieten()?;
        world.close()?;
        Ok(world.report)
    }

    fn step(&mut self) -> Verdict {
        let seat = self.rng.random_range(0..self.seats.len());
        let action = self.rng.random_range(0..200_u32);
        if (68..114).contains(&action) {
            return self.advance();
        }
        if (114..130).contains(&action) {
            return self.weather.change().map_err(wrong("the weather"));
        }
        if (130..133).contains(&action) {
            return self.kill(seat);
        }
        if self.seats[seat].alive.is_none() {
            return if action % 4 == 0 { self.open(seat) } else { Ok(()) };
        }
        if self.weather.is_stopped(&self.seats[seat].name) {
            return Ok(());
        }
        match action {
            0..68 => self.post(seat),
            133..166 => self.poll(seat).map(|_| ()),
            166..171 => self.drain(seat),
            171..181 => self.rewrite(seat),
            181..186 => self.cancel(seat),
            186..193 => {
                let other = self.rng.random_range(0..self.seats.len());
                self.meet(seat, other)
            }
            193..195 => self.end(seat, false),
            195..197 => self.end(seat, true),
            _ => self.use_what_is_stale(seat),
        }
    }

    /// The life of a seat that can act now.
    fn alive(&mut self, seat: usize) -> Option<&mut Alive> {
        let seat = self.seats.get_mut(seat)?;
        if self.weather.is_stopped(&seat.name) { None } else { seat.alive.as_mut() }
    }

    fn advance(&mut self) -> Verdict {
        match self.rng.random_range(0..20) {
            0..12 => {
                self.fabric.advance(self.rng.random_range(1..8));
            }
            12..19 => {
                self.fabric.advance_by(Duration::from_nanos(self.rng.random_range(0..300_000)));
            }
            _ => {
                self.fabric.advance_by(Duration::from_micros(self.rng.random_range(0..800_000)));
            }
        }
        Ok(())
    }

    fn open(&mut self, seat: usize) -> Verdict {
        let name = Arc::clone(&self.seats[seat].name);
        let backend = if self.report.killed == 0 {
            self.fabric.backend(self.exchange.preset.clone(), Arc::clone(&name))
        } else {
            self.fabric.restart(&name).map_err(wrong("restart"))?
        };
        let backend = (self.exchange.wrap)(backend);
        self.checker.expect(backend.capabilities().clone());
        self.weather.reborn(&name);
        let region = Region::host(REGION_BYTES).map_err(wrong("memory"))?;
        // A rule may fail it, but not for ever.
        let mut tries = 0;
        let local = loop {
            match backend.register(&region) {
                Ok(local) => break local,
                Err(error) => {
                    tries += 1;
                    let names = [&*name, &*name];
                    let wanted =
                        self.weather.may_fail(Kind::Register, names, self.weather.changes());
                    let given_up = tries > 20 || !is_ruled(&error) || !wanted;
                    ensure!(!given_up, "register: {error}");
                }
            }
        };
        let key = backend.key_blob(local).map_err(wrong("key_blob"))?;
        let contents = self.tag(REGION_BYTES);
        let life = self.checker.born(&*name, &region, contents).map_err(wrong("memory"))?;
        self.keys.push((life, key.clone()));
        let (links, stale) = (Vec::new(), Vec::new());
        self.seats[seat].alive = Some(Alive { life, backend, region, local, key, links, stale });
        Ok(())
    }

    fn tag(&mut self, bytes: u64) -> Vec<u8> {
        self.next_tag += 1;
        tag(self.next_tag, usize::try_from(bytes).unwrap_or(0))
    }

    /// Runs a handshake, as far as it goes.
    fn meet(&mut self, one: usize, other: usize) -> Verdict {
        if one == other {
            return Ok(());
        }
        let Some(a) = self.alive(one) else { return Ok(()) };
        let (mine, life, key) = (Arc::clone(&a.backend), a.life, a.key.clone());
        let Some(b) = self.alive(other) else { return Ok(()) };
        let (theirs, their_life, their_key) = (Arc::clone(&b.backend), b.life, b.key.clone());
        let offer = mine.offer().map_err(wrong("offer"))?;
        let Some((at_other, reply)) = ruled("accept", theirs.accept(&offer))? else {
            return Ok(());
        };
        self.join(other, at_other, life, None)?;
        let Some((at_one, completion)) = ruled("complete", mine.complete(&reply))? else {
            return Ok(());
        };
        self.join(one, at_one, their_life, Some(at_other))?;
        self.import(one, at_one, &their_key)?;
        let Some(finished) = ruled("finish", theirs.finish(&completion))? else { return Ok(()) };
        ensure!(finished == at_other, "finish gives another peer than accept");
        self.import(other, at_other, &key)?;
        ruled("connect", at_once("connect", mine.connect(at_one))?)?;
        Ok(())
    }

    fn join(
        &mut self,
        seat: usize,
        peer: PeerId,
        other: LifeId,
        theirs: Option<PeerId>,
    ) -> Verdict {
        let Some(alive) = self.seats[seat].alive.as_mut() else { return Ok(()) };
        let life = alive.life;
        if alive.link(peer).is_none() {
            alive.links.push(Link { peer, other, key: None, severed: false });
        }
        self.checker.met(life, peer, other, theirs)
    }

    fn import(&mut self, seat: usize, peer: PeerId, key: &KeyBlob) -> Verdict {
        let Some(alive) = self.seats[seat].alive.as_mut() else { return Ok(()) };
        let backend = Arc::clone(&alive.backend);
        if let Some(link) = alive.link(peer).filter(|link| link.key.is_none()) {
            link.key = ruled("import_key", backend.import_key(peer, key))?;
        }
        Ok(())
    }

    fn post(&mut self, seat: usize) -> Verdict {
        let limits = self.exchange.preset.capabilities().limits;
        let most = self.rng.random_range(0..=4.min(limits.max_batch_segments));
        let (picks, mode) = (self.rng.random_range(0..64_usize), self.rng.random_ratio(1, 2));
        let mode = if mode { Mode::Read } else { Mode::Write };
        let Some(alive) = self.alive(seat) else { return Ok(()) };
        let ready: Vec<Link> =
            alive.links.iter().filter(|l| l.key.is_some() && !l.severed).copied().collect();
        let (life, local, backend) = (alive.life, alive.local, Arc::clone(&alive.backend));
        if ready.is_empty() {
            return Ok(());
        }
        let link = ready[picks % ready.len()];
        let Some(remote) = link.key else { return Ok(()) };
        let target = if mode == Mode::Read { life } else { link.other };
        let mut ranges: Vec<(u64, u64, u64)> = Vec::new();
        let mut taken = Vec::new();
        for _ in 0..most {
            let bytes = self.rng.random_range(1..=SLOT_BYTES.min(limits.max_segment_bytes));
            let (from, into) =
                (self.rng.random_range(0..SLOTS / 2), self.rng.random_range(SLOTS / 2..SLOTS));
            let inside = |rng: &mut ChaCha8Rng| rng.random_range(0..=SLOT_BYTES - bytes);
            let (from, at) = (slot(from) + inside(&mut self.rng), slot(into));
            if taken.contains(&into) || !self.checker.is_free(target, at, SLOT_BYTES) {
                continue;
            }
            taken.push(into);
            let into = at + inside(&mut self.rng);
            ranges.push(if mode == Mode::Read { (into, from, bytes) } else { (from, into, bytes) });
        }
        let notify = ranges.is_empty() || self.rng.random_ratio(1, 2);
        let id = TransferId(self.next_id);
        self.next_id += 1;
        let notify = notify.then(|| id.0.to_le_bytes().to_vec());
        let segments: Vec<PostedSegment> = ranges
            .iter()
            .map(|&(local_offset, remote_offset, bytes)| PostedSegment {
                local,
                remote,
                local_offset,
                remote_offset,
                bytes,
            })
            .collect();
        self.checker.posting(Posted {
            id,
            from: life,
            peer: link.peer,
            mode,
            segments: ranges,
            registrations: vec![local],
            notify: notify.clone(),
        })?;
        let (from, to) =
            (Arc::clone(&self.seats[seat].name), Arc::<str>::from(self.checker.name(link.other)));
        let names = [&*from, &*to];
        match backend.submit(id, link.peer, mode, &segments, notify.as_deref()) {
            Ok(Submit::Submitted) => {
                self.report.posted += 1;
                self.posts.insert(id, (self.weather.changes(), Arc::clone(&to)));
                self.checker.posted(id)
            }
            Ok(Submit::Done { route }) => {
                self.report.posted += 1;
                self.report.done += 1;
                self.checker.posted(id)?;
                let outcome = Outcome::Done { route };
                self.checker.event(life, &Event::Settled { id, outcome }).map(drop)
            }
            Ok(Submit::Full) => {
                self.report.refused += 1;
                self.checker.refused(id)?;
                let others = self.checker.in_flight_to(life, link.peer);
                let wanted = others > 0 || self.weather.may_be_full(names);
                ensure!(wanted, "{from}: {id} is full, and nothing is in flight to {}", link.peer);
                Ok(())
            }
            Err(error) => {
                self.report.refused += 1;
                ensure!(is_ruled(&error), "a good batch is refused: {error}");
                if !self.weather.may_fail(Kind::Post, names, self.weather.changes()) {
                    self.checker.unexplained(life, link.peer, format!("{id} is refused: {error}"));
                }
                self.checker.refused(id)
            }
        }
    }

    /// Polls once. How many events there were.
    fn poll(&mut self, seat: usize) -> Verdict<usize> {
        let limit = self.rng.random_range(1..=8);
        let Some(alive) = self.alive(seat) else { return Ok(0) };
        let (backend, life) = (Arc::clone(&alive.backend), alive.life);
        let mut events = Events::with_limit(limit);
        backend.poll(&mut events);
        let events: Vec<Event> = events.drain().collect();
        ensure!(events.len() <= limit, "{} events in a buffer of {limit}", events.len());
        for event in &events {
            self.explain(seat, life, event);
            match self.checker.event(life, event)? {
                Seen::Settled(_, true) => self.report.done += 1,
                Seen::Settled(_, false) => self.report.undone += 1,
                Seen::Notified(_) => self.report.notified += 1,
                Seen::PeerDown(peer) => {
                    self.report.downs += 1;
                    if let Some(alive) = self.seats[seat].alive.as_mut() {
                        alive.links.retain(|link| link.peer != peer);
                        alive.stale.push(peer);
                    }
                }
                Seen::Other => {}
            }
        }
        Ok(events.len())
    }

    /// A transfer that failed did so by a rule that was installed meanwhile; or else its connection must be over.
    fn explain(&mut self, seat: usize, life: LifeId, event: &Event) {
        let Event::Settled { id, outcome: Outcome::Failed(error) } = event else { return };
        let (Some((since, to)), Some(peer)) = (self.posts.get(id), self.checker.peer_of(*id))
        else {
            return;
        };
        let names = [&*self.seats[seat].name, &**to];
        let kinds = [Kind::Data, Kind::Completion];
        if !kinds.into_iter().any(|kind| self.weather.may_fail(kind, names, *since)) {
            self.checker.unexplained(life, peer, format!("{id} failed: {error}"));
        }
    }

    /// Polls until there is nothing more.
    fn drain(&mut self, seat: usize) -> Verdict {
        self.poll_all(seat)?;
        let now = self.fabric.now();
        match self.alive(seat).map(|alive| alive.life) {
            Some(life) => self.checker.drained(life, now),
            None => Ok(()),
        }
    }

    /// How many events there were until a poll gave none.
    fn poll_all(&mut self, seat: usize) -> Verdict<usize> {
        let mut told = 0;
        for _ in 0..QUIET_POLLS {
            match self.poll(seat)? {
                0 => return Ok(told),
                count => told += count,
            }
        }
        Err(Violation::new(format!("{told} events, and each poll gives more")))
    }

    /// Uses memory again that is its own.
    fn rewrite(&mut self, seat: usize) -> Verdict {
        let number = self.rng.random_range(0..SLOTS);
        let Some(life) = self.alive(seat).map(|alive| alive.life) else { return Ok(()) };
        if !self.checker.is_free(life, slot(number), SLOT_BYTES) {
            return Ok(());
        }
        let bytes = self.tag(SLOT_BYTES);
        self.checker.rewrite(life, slot(number), &bytes)
    }

    fn cancel(&mut self, seat: usize) -> Verdict {
        let Some(alive) = self.alive(seat) else { return Ok(()) };
        let (backend, life) = (Arc::clone(&alive.backend), alive.life);
        let open = self.checker.in_flight(life);
        if open.is_empty() {
            return misuse("cancelling what was never posted", backend.cancel(TransferId(0)));
        }
        let id = open[self.rng.random_range(0..open.len())];
        match backend.cancel(id) {
            Ok(()) => self.checker.cancelled(id),
            // It may have settled just now.
            Err(error) => ensure!(error.kind() == ErrorKind::Misuse, "cancel: {error}"),
        }
        Ok(())
    }

    /// Severs a peer, or ends its access.
    fn end(&mut self, seat: usize, revoke: bool) -> Verdict {
        let pick = self.rng.random_range(0..16_usize);
        let (now, can) = (self.fabric.now(), self.exchange.preset.capabilities().revoke);
        let Some(alive) = self.alive(seat) else { return Ok(()) };
        if alive.links.is_empty() {
            return Ok(());
        }
        let at = pick % alive.links.len();
        let (backend, life, peer) = (Arc::clone(&alive.backend), alive.life, alive.links[at].peer);
        if revoke && can != Revoke::PerPeer {
            let Err(error) = backend.revoke(peer) else {
                return Err(Violation::new("it revokes what it does not claim to"));
            };
            ensure!(error.kind() == ErrorKind::Unsupported, "revoke: {error}");
            return Ok(());
        }
        alive.links[at].severed = true;
        if revoke {
            backend.revoke(peer).map_err(wrong("revoke"))?;
            self.checker.revoked(life, peer, now)?;
        } else {
            backend.sever(peer).map_err(wrong("sever"))?;
            self.checker.severed(life, peer, now)?;
        }
        let late = backend.submit(TransferId(0), peer, Mode::Write, &[], Some(b"late"));
        ensure!(late.is_err(), "a severed peer is posted to");
        Ok(())
    }

    /// What is stale must be refused, and nothing of it may happen.
    fn use_what_is_stale(&mut self, seat: usize) -> Verdict {
        let pick = self.rng.random_range(0..16_usize);
        let Some(alive) = self.alive(seat) else { return Ok(()) };
        let (backend, local, key) = (Arc::clone(&alive.backend), alive.local, alive.key.clone());
        let region = alive.region.clone();
        if !alive.stale.is_empty() {
            let peer = alive.stale[pick % alive.stale.len()];
            let post = backend.submit(TransferId(0), peer, Mode::Write, &[], Some(b"stale"));
            misuse("posting to a peer that is down", post)?;
            misuse("severing a peer that is down", backend.sever(peer))?;
            misuse("asking about a peer that is down", backend.peer_info(peer))?;
            misuse("importing a key of a peer that is down", backend.import_key(peer, &key))?;
        }
        let ready: Vec<Link> =
            alive.links.iter().filter(|l| l.key.is_some() && !l.severed).copied().collect();
        let Some(link) = ready.get(pick % ready.len().max(1)) else { return Ok(()) };
        let Some(remote) = link.key else { return Ok(()) };
        let mut foreign = self.keys.iter().filter(|(life, _)| *life != link.other);
        if let Some((_, foreign)) = foreign.next_back() {
            match backend.import_key(link.peer, foreign) {
                Ok(_) => return Err(Violation::new("another incarnation's key is accepted")),
                Err(error) => ensure!(error.kind() == ErrorKind::Peer, "a foreign key: {error}"),
            }
        }
        let limits = backend.capabilities().limits;
        let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 };
        let long = PostedSegment { bytes: limits.max_segment_bytes + 1, ..segment };
        let over = |segments: &[PostedSegment], notify: Option<&[u8]>| {
            backend.submit(TransferId(0), link.peer, Mode::Read, segments, notify)
        };
        let (many, note) =
            (limits.max_batch_segments as usize + 1, limits.max_notification_bytes as usize + 1);
        refused("a segment over the limit", over(&[long], None))?;
        refused("a batch over the limit", over(&vec![segment; many], None))?;
        refused("a notification over the limit", over(&[], Some(&vec![0; note])))?;
        refused("a segment of no bytes", over(&[PostedSegment { bytes: 0, ..segment }], None))?;
        refused("a batch of nothing", over(&[], None))?;
        let post = |local: RegionId, remote: RemoteRegionId| {
            let (local_offset, remote_offset) = (slot(0), slot(SLOTS - 1));
            let segment = PostedSegment { local, remote, local_offset, remote_offset, bytes: 8 };
            backend.submit(TransferId(0), link.peer, Mode::Write, &[segment], Some(b"stale"))
        };
        if let Some(gone) = ruled("register", backend.register(&region))? {
            backend.deregister(gone).map_err(wrong("deregister"))?;
            misuse("deregistering twice", backend.deregister(gone))?;
            refused("a local region that is gone", post(gone, remote))?;
        }
        let unknown = RemoteRegionId::new(remote.slot(), remote.generation() + 1);
        refused("a remote region that was never imported", post(local, unknown))
    }

    fn kill(&mut self, seat: usize) -> Verdict {
        let name = Arc::clone(&self.seats[seat].name);
        let Some(alive) = self.seats[seat].alive.take() else { return Ok(()) };
        self.fabric.kill(&name).map_err(wrong("kill"))?;
        self.weather.reborn(&name);
        self.report.killed += 1;
        self.checker.killed(alive.life)?;
        let post = alive.backend.offer();
        ensure!(post.is_err(), "{name} is dead, and makes an offer");
        Ok(())
    }

    /// Ends all faults and lets everything come to its end.
    fn quieten(&mut self) -> Verdict {
        self.weather.clear().map_err(wrong("the weather"))?;
        let begun = self.fabric.now();
        for round in 0.. {
            ensure!(round < QUIET_ROUNDS, "there is always something more to poll");
            let idle = self.fabric.run_until_idle(1_000_000);
            ensure!(idle, "the fabric does not come to rest");
            let mut told = 0;
            for seat in 0..self.seats.len() {
                told += self.poll_all(seat)?;
                self.drain(seat)?;
            }
            if told == 0 && self.fabric.next_at().is_none() {
                break;
            }
        }
        let took = self.fabric.now() - begun;
        ensure!(took <= QUIET_WITHIN, "it took {took:?} until everything was over");
        self.checker.all_quiet()
    }

    /// Closes every engine: nothing may be left.
    fn close(&mut self) -> Verdict {
        for seat in 0..self.seats.len() {
            let Some(alive) = self.alive(seat) else { continue };
            let (life, backend) = (alive.life, Arc::clone(&alive.backend));
            self.checker.closing(life, self.fabric.now());
            at_once("close", backend.close())?.map_err(wrong("close"))?;
            self.poll_all(seat)?;
            self.checker.closed(life)?;
            ensure!(backend.offer().is_err(), "an engine is closed, and makes an offer");
        }
        self.fabric.run_until_idle(1_000_000);
        self.checker.check()?;
        self.seats.clear();
        let left = self.fabric.remains();
        ensure!(left.is_none(), "every engine is gone, and there is left: {left:?}");
        Ok(())
    }
}

/// Whether an error is one that a rule makes, or the end of a connection.
fn is_ruled(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Peer | ErrorKind::Resources | ErrorKind::Fabric)
}

/// `None` where a rule failed it, or the peer is gone.
fn ruled<T>(what: &str, result: kvx_core::Result<T>) -> Verdict<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_ruled(&error) => Ok(None),
        Err(error) => Err(wrong(what)(error)),
    }
}

fn misuse<T>(what: &str, result: kvx_core::Result<T>) -> Verdict {
    match result {
        Ok(_) => Err(Violation::new(format!("{what} is accepted"))),
        Err(error) if error.kind() == ErrorKind::Misuse => Ok(()),
        Err(error) => Err(wrong(what)(error)),
    }
}

/// As misuse; or there is no room, or the peer is gone.
fn refused(what: &str, result: kvx_core::Result<Submit>) -> Verdict {
    match result {
        Ok(Submit::Full) => Ok(()),
        Ok(Submit::Submitted | Submit::Done { .. }) => {
            Err(Violation::new(format!("{what} is accepted")))
        }
        Err(error) if matches!(error.kind(), ErrorKind::Misuse | ErrorKind::Peer) => Ok(()),
        Err(error) => Err(wrong(what)(error)),
    }
}
