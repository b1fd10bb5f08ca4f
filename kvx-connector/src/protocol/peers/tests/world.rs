//! Several processes, each with a machine, a fabric and a control channel, in virtual time. Every output is checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::{Error, ErrorKind};

use super::engines::{FAB, Plan, shared};
use super::fabric::Fabric;
use crate::protocol::peers::fault::Fault;
use crate::protocol::peers::timers::Chance;
use crate::protocol::peers::{
    Connection, GoneReason, Input, Limits, Local, LocalRank, Message, Output, OwnCards, Peers,
    Place, Remote, Role, Route, SessionId, Setup, Step, StepId, Stepped, Want, WantId,
};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SEC: Duration = Duration::from_secs(1);

/// What goes wrong, in parts of 1024.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weather {
    pub(super) lose_message: u64,
    pub(super) fail_step: u64,
    pub(super) slow_step: u64,
    pub(super) slow_message: u64,
    pub(super) fail_dial: u64,
    /// A connection that is ended never comes to be over.
    pub(super) undead: u64,
    /// A fabric does not notice that the other side is dead.
    pub(super) unnoticed: u64,
}

/// For what a process has no descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Starved {
    Fabric,
    Dialling,
}

fn no_descriptor(operation: &'static str) -> Error {
    Error::new(ErrorKind::Resources, operation, "no descriptor").with_remedy("ulimit -n")
}

#[derive(Debug)]
enum Event {
    Dial { from: usize, to: Address },
    DialFailed { at: usize, address: Address },
    Up { at: usize, session: SessionId, remote: Remote, dialled: Option<Address> },
    Deliver { at: usize, session: SessionId, bytes: Vec<u8> },
    SessionDown { at: usize, session: SessionId },
    Work { at: usize, id: StepId, step: Step },
    Result { at: usize, id: StepId, result: Stepped },
    Break { at: usize, to: Incarnation, before: Duration },
    Down { at: usize, peer: PeerId },
}

/// One life of one process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) alive: bool,
    pub(super) peers: Peers,
    pub(super) remote: Remote,
    pub(super) address: Address,
    pub(super) fabric: Fabric,
    /// Sessions that it may send by, and the other end.
    wires: BTreeMap<SessionId, (usize, SessionId)>,
    pub(super) wants: BTreeMap<WantId, Duration>,
    pub(super) said: Vec<(Duration, Said)>,
    gone: BTreeSet<Connection>,
    replaced: BTreeMap<Incarnation, (EngineName, Option<Place>)>,
    /// Who is met and not gone.
    met: BTreeMap<(EngineName, Option<Place>), Incarnation>,
}

/// What a machine said that its callers see.
#[derive(Clone, Debug)]
pub(super) enum Said {
    Ready(WantId, Arc<Route>),
    Failed(WantId, Arc<Error>),
    Met(Connection),
    Gone(Option<Connection>, GoneReason),
    Dialled,
    Ended(Connection),
    Sent(Message),
}

/// The processes of one life of an engine.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) plan: Plan,
    pub(super) life: Incarnation,
    pub(super) scheduler: usize,
    /// Replica by replica.
    pub(super) ranks: Vec<usize>,
    pub(super) port: u16,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Duration,
    pub(super) chance: Chance,
    pub(super) weather: Weather,
    pub(super) limits: Limits,
    pub(super) processes: Vec<Process>,
    pub(super) fault: Option<Fault>,
    /// Whether it is looked after each step whether all holds that must: not while time is taken.
    pub(super) checked: bool,
    /// Addresses that swallow whatever is sent to them.
    pub(super) silent: BTreeSet<Address>,
    /// Processes that have no descriptor left: for a connection of the fabric's, or for dialling, too.
    pub(super) starved: BTreeMap<usize, Starved>,
    events: BTreeMap<(Duration, u64), Event>,
    listening: BTreeMap<Address, usize>,
    last_delivery: BTreeMap<(usize, SessionId), Duration>,
    numbers: u64,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            now: Duration::ZERO,
            chance: Chance::new(seed),
            weather: Weather::default(),
            limits: Limits::default(),
            processes: Vec::new(),
            fault: None,
            checked: true,
            silent: BTreeSet::new(),
            starved: BTreeMap::new(),
            events: BTreeMap::new(),
            listening: BTreeMap::new(),
            last_delivery: BTreeMap::new(),
            numbers: 0,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.chance.draw() % end
    }

    pub(super) fn happens(&mut self, parts: u64) -> bool {
        parts > 0 && self.below(1024) < parts
    }

    pub(super) fn life(&mut self) -> Incarnation {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.number().to_be_bytes());
        Incarnation::from_bytes(bytes)
    }

    /// Starts an engine: a scheduler at `port`, its ranks at those that follow.
    pub(super) fn start(&mut self, plan: &Plan, port: u16) -> Engine {
        let life = self.life();
        let scheduler = self.spawn(plan, life, None, at(port));
        let mut ranks = Vec::new();
        let mut next = port + 1;
        for replica in 0..plan.grid.dp {
            for rank in 0..plan.layouts(replica).len() {
                ranks.push(self.spawn(plan, life, Some((replica, rank)), at(next)));
                next += 1;
            }
        }
        let engine = Engine { plan: plan.clone(), life, scheduler, ranks, port };
        self.serve(&engine);
        engine
    }

    /// Has the scheduler serve the cards that its ranks have now.
    pub(super) fn serve(&mut self, engine: &Engine) {
        let mut cards = Vec::new();
        let mut ranks = engine.ranks.iter();
        for replica in 0..engine.plan.grid.dp {
            for (layout, rank) in engine.plan.layouts(replica).into_iter().zip(&mut ranks) {
                let process = &self.processes[*rank];
                let (life, at) = (process.remote.incarnation, process.address.clone());
                cards.push(engine.plan.card(layout, life, at));
            }
        }
        let cards = OwnCards::new(&engine.plan.name, shared(cards)).unwrap();
        self.step(engine.scheduler, Input::Serve(cards));
    }

    pub(super) fn spawn(
        &mut self,
        plan: &Plan,
        life: Incarnation,
        rank: Option<(u32, usize)>,
        address: Address,
    ) -> usize {
        let incarnation = self.life();
        let layouts = rank.map(|(replica, rank)| (plan.layouts(replica), rank));
        let place = layouts.as_ref().map(|(layouts, rank)| Place::from(layouts[*rank].coords()));
        let rank = layouts.map(|(layouts, rank)| LocalRank {
            coords: *layouts[rank].coords(),
            card: Some(Arc::from(plan.card(layouts[rank].clone(), incarnation, address.clone()))),
            layouts,
            backends: vec![FAB],
        });
        let engine = plan.name.clone();
        let local =
            Local { engine: engine.clone(), incarnation, life, facts: plan.facts.clone(), rank };
        let mut setup = Setup::new(local, plan.choosing(), self.chance.draw());
        setup.limits = self.limits;
        let mut peers = Peers::new(setup);
        peers.fault = self.fault;
        let remote = Remote { engine, incarnation, rank: place };
        self.listening.insert(address.clone(), self.processes.len());
        self.processes.push(Process {
            alive: true,
            peers,
            remote,
            address,
            fabric: Fabric::new(incarnation, &plan.transport),
            wires: BTreeMap::new(),
            wants: BTreeMap::new(),
            said: Vec::new(),
            gone: BTreeSet::new(),
            replaced: BTreeMap::new(),
            met: BTreeMap::new(),
        });
        self.processes.len() - 1
    }

    /// Kills a process. Others notice sooner or later.
    pub(super) fn kill(&mut self, at: usize) {
        let (address, life) = {
            let process = &mut self.processes[at];
            process.alive = false;
            (process.address.clone(), process.remote.incarnation)
        };
        if self.listening.get(&address) == Some(&at) {
            self.listening.remove(&address);
        }
        let hard = self.happens(256);
        for (far, session) in std::mem::take(&mut self.processes[at].wires).into_values() {
            let delay = if hard { SEC * 2 } else { MS };
            self.later(delay, Event::SessionDown { at: far, session });
        }
        for other in 0..self.processes.len() {
            if other != at && !self.happens(self.weather.unnoticed) {
                let (delay, before) = (MS * u32::try_from(self.below(2000)).unwrap(), self.now);
                self.later(delay, Event::Break { at: other, to: life, before });
            }
        }
    }

    pub(super) fn kill_engine(&mut self, engine: &Engine) {
        self.kill(engine.scheduler);
        engine.ranks.iter().for_each(|rank| self.kill(*rank));
    }

    /// Breaks one session of a process, as a network does.
    pub(super) fn cut(&mut self, at: usize) {
        let sessions: Vec<SessionId> = self.processes[at].wires.keys().copied().collect();
        if sessions.is_empty() {
            return;
        }
        let index = usize::try_from(self.below(sessions.len() as u64)).unwrap();
        let (far, other) = self.processes[at].wires[&sessions[index]];
        self.later(MS, Event::SessionDown { at, session: sessions[index] });
        self.later(MS * 2, Event::SessionDown { at: far, session: other });
    }

    /// Breaks the fabric's connection between two processes.
    pub(super) fn break_fabric(&mut self, one: usize, other: usize) {
        let before = self.now;
        for (at, far) in [(one, other), (other, one)] {
            let to = self.processes[far].remote.incarnation;
            let delay = MS * u32::try_from(self.below(50)).unwrap();
            self.later(delay, Event::Break { at, to, before });
        }
    }

    pub(super) fn want(&mut self, at: usize, engine: &Engine, role: Role) -> WantId {
        self.want_with(
            at,
            &engine.plan.name.clone(),
            at_port(engine),
            Some(engine.life),
            role,
            SEC * 10,
        )
    }

    pub(super) fn want_with(
        &mut self,
        at: usize,
        engine: &EngineName,
        address: Address,
        life: Option<Incarnation>,
        role: Role,
        within: Duration,
    ) -> WantId {
        self.want_replica(at, engine, 0, address, life, role, within)
    }

    #[expect(clippy::too_many_arguments, reason = "all that a want says")]
    pub(super) fn want_replica(
        &mut self,
        at: usize,
        engine: &EngineName,
        replica: u32,
        address: Address,
        life: Option<Incarnation>,
        role: Role,
        within: Duration,
    ) -> WantId {
        let (id, until) = (WantId(self.number()), self.now + within);
        self.processes[at].wants.insert(id, until);
        let engine = engine.clone();
        let want = Want { id, engine, replica, address, life, role, until };
        self.step(at, Input::Want(want));
        id
    }

    fn later(&mut self, after: Duration, event: Event) {
        let key = (self.now + after, self.number());
        self.events.insert(key, event);
    }

    fn latency(&mut self) -> Duration {
        let slow = self.happens(self.weather.slow_message);
        let micros = if slow { 500_000 } else { 100 };
        Duration::from_micros(50 + self.below(micros))
    }

    /// Runs until this time.
    pub(super) fn run_until(&mut self, until: Duration) {
        loop {
            let wake = self.processes.iter().enumerate().filter(|(_, process)| process.alive);
            let wake = wake.filter_map(|(at, process)| Some((process.peers.wake()?, at))).min();
            let event = self.events.first_key_value().map(|(key, _)| key.0);
            let next = [wake.map(|(time, _)| time), event].into_iter().flatten().min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            match (wake, event) {
                (Some((time, at)), event) if event.is_none_or(|event| time <= event) => {
                    self.step(at, Input::Tick);
                    let wake = self.processes[at].peers.wake();
                    assert!(wake.is_none_or(|wake| wake > self.now), "it wakes for ever");
                }
                _ => {
                    if let Some((_, event)) = self.events.pop_first() {
                        self.happen(event);
                    }
                }
            }
        }
        self.now = until;
    }

    pub(super) fn run(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Dial { from, to } => self.dial(from, to),
            Event::DialFailed { at, address } => {
                // As the channel's is.
                let error = match self.starved.get(&at) {
                    Some(Starved::Dialling) => no_descriptor("dial"),
                    _ => Error::peer("dial", "refused").with_remedy("look who listens there"),
                };
                let error = error.with_context("address", &address);
                self.step(at, Input::DialFailed { address, error });
            }
            Event::Up { at, session, remote, dialled } => {
                if self.processes[at].wires.contains_key(&session) {
                    self.step(at, Input::SessionUp { session, remote, dialled });
                } else if let Some(address) = dialled {
                    let error = Error::peer("dial", "reset");
                    self.step(at, Input::DialFailed { address, error });
                }
            }
            Event::Deliver { at, session, bytes } => {
                if self.processes[at].wires.contains_key(&session) {
                    self.step(at, Input::Message { session, bytes });
                }
            }
            Event::SessionDown { at, session } => {
                if self.processes[at].wires.remove(&session).is_some() {
                    self.step(at, Input::SessionDown { session, error: None });
                }
            }
            Event::Work { at, id, step } => {
                let now = self.now;
                let result = if self.happens(self.weather.fail_step) {
                    Stepped::Failed(Error::peer("fab", "bad luck"))
                } else if matches!(step, Step::Complete { .. } | Step::Finish { .. })
                    && self.starved.contains_key(&at)
                {
                    Stepped::Failed(no_descriptor("fab"))
                } else {
                    self.processes[at].fabric.work(now, &step)
                };
                let slow = self.happens(self.weather.slow_step);
                let end = if slow { 3000 } else { 1 };
                let delay = MS * u32::try_from(self.below(end)).unwrap();
                self.later(delay, Event::Result { at, id, result });
            }
            Event::Result { at, id, result } => self.step(at, Input::Stepped { step: id, result }),
            Event::Break { at, to, before } => {
                if let Some(peer) = self.processes[at].fabric.break_off(to, before) {
                    self.later(Duration::ZERO, Event::Down { at, peer });
                }
            }
            Event::Down { at, peer } => {
                if let Some(given) = self.processes[at].fabric.given.get_mut(&peer) {
                    given.down = true;
                }
                let connection = Connection { backend: FAB, peer };
                self.step(at, Input::PeerDown { connection, error: None });
            }
        }
    }

    fn dial(&mut self, from: usize, to: Address) {
        if !self.processes[from].alive {
            return;
        }
        let far = self.listening.get(&to).copied();
        let silent = self.silent.contains(&to);
        let starved = self.starved.get(&from) == Some(&Starved::Dialling);
        let fails = |world: &mut Self| starved || world.happens(world.weather.fail_dial);
        let Some(far) = far.filter(|_| !silent && !fails(self)) else {
            let delay = if silent { SEC * 30 } else { MS };
            return self.later(delay, Event::DialFailed { at: from, address: to });
        };
        let (near, other) = (SessionId(self.number()), SessionId(self.number()));
        self.processes[from].wires.insert(near, (far, other));
        self.processes[far].wires.insert(other, (from, near));
        let remote = self.processes[from].remote.clone();
        self.later(Duration::ZERO, Event::Up { at: far, session: other, remote, dialled: None });
        let remote = self.processes[far].remote.clone();
        let up = Event::Up { at: from, session: near, remote, dialled: Some(to) };
        let delay = self.latency();
        self.last_delivery.insert((from, near), self.now + delay);
        self.later(delay, up);
    }

    pub(super) fn step(&mut self, at: usize, input: Input) {
        if !self.processes[at].alive {
            return;
        }
        let mut out = Vec::new();
        let now = self.now;
        self.processes[at].peers.step(now, input, &mut out);
        if self.checked {
            super::checks::check(&self.processes[at].peers);
        }
        for output in out {
            self.output(at, output);
        }
    }

    fn output(&mut self, at: usize, output: Output) {
        let now = self.now;
        let process = &mut self.processes[at];
        let mut say = |said: Said| process.said.push((now, said));
        match output {
            Output::Dial(to) => {
                say(Said::Dialled);
                let delay = self.latency();
                self.later(delay, Event::Dial { from: at, to });
            }
            Output::CloseSession(session) => {
                let wire = process.wires.remove(&session);
                let (far, other) = wire.expect("a session is closed once, and not after its end");
                let last = self.last_delivery.get(&(far, other)).copied().unwrap_or(now);
                let delay = self.latency() + last.saturating_sub(now);
                self.later(delay, Event::SessionDown { at: far, session: other });
            }
            Output::Send { session, bytes } => {
                let message = Message::decode(&bytes).unwrap();
                // A session loses nothing while it is up; what is asked is asked again all the same.
                let asked_once = message == Message::Changed;
                say(Said::Sent(message));
                let wire = process.wires.get(&session);
                let (far, other) = *wire.expect("nothing is sent by a session that is over");
                if !asked_once && self.happens(self.weather.lose_message) {
                    return;
                }
                let last = self.last_delivery.get(&(far, other)).copied().unwrap_or(now);
                let time = last.max(now + self.latency());
                self.last_delivery.insert((far, other), time);
                self.later(time - now, Event::Deliver { at: far, session: other, bytes });
            }
            Output::Step { id, step } => {
                let delay = Duration::from_micros(self.below(200));
                self.later(delay, Event::Work { at, id, step });
            }
            Output::Disconnect(connection) => self.end(at, connection, false),
            Output::Sever(connection) => self.end(at, connection, true),
            Output::Ready { want, route } => {
                let until = process.wants.remove(&want).expect("a want ends once");
                assert!(now <= until, "ready after its time");
                say(Said::Ready(want, Arc::clone(&route)));
                for confirm in &route.confirms {
                    let session = process.peers.session_of(confirm.incarnation);
                    assert!(session.is_some(), "nobody can be told");
                }
                for link in &route.links {
                    let given = &process.fabric.given[&link.connection.peer];
                    assert_eq!(given.to, link.incarnation, "a connection to somebody else");
                    let over = given.down || given.severed + given.disconnected > 0;
                    assert!(!over, "a route by a connection that is over");
                    assert!(!process.gone.contains(&link.connection), "a route by who is gone");
                    assert!(
                        !process.replaced.contains_key(&link.incarnation),
                        "a life that was replaced"
                    );
                }
            }
            Output::Failed { want, error } => {
                let until = process.wants.remove(&want).expect("a want ends once");
                assert!(now <= until, "failed after its time");
                say(Said::Failed(want, error));
            }
            Output::Met { remote, connection } => {
                assert!(!process.gone.contains(&connection), "met who is gone");
                assert!(
                    !process.replaced.contains_key(&remote.incarnation),
                    "met who was replaced"
                );
                let given = &process.fabric.given[&connection.peer];
                assert_eq!(given.to, remote.incarnation, "met somebody else");
                assert!(!given.down, "met by a connection that is over");
                let before = process.met.insert((remote.engine, remote.rank), remote.incarnation);
                let other = before.is_some_and(|before| before != remote.incarnation);
                assert!(!other, "another life of it is met and not gone");
                say(Said::Met(connection));
            }
            Output::Gone { remote, connection, reason } => {
                if let Some(connection) = connection {
                    assert!(process.gone.insert(connection), "gone twice");
                }
                let at = (remote.engine, remote.rank);
                if process.met.get(&at) == Some(&remote.incarnation) {
                    process.met.remove(&at);
                }
                if reason == GoneReason::Superseded {
                    process.replaced.insert(remote.incarnation, at);
                } else {
                    // Nobody is in the place any more: whoever was there before may come back.
                    process.replaced.retain(|_, place| *place != at);
                }
                say(Said::Gone(connection, reason));
            }
        }
    }

    fn end(&mut self, at: usize, connection: Connection, at_once: bool) {
        let now = self.now;
        let process = &mut self.processes[at];
        let own = process.remote.incarnation;
        process.said.push((now, Said::Ended(connection)));
        let given = process.fabric.given.get_mut(&connection.peer).expect("it was given");
        assert!(!given.down, "what is over is ended");
        if at_once {
            assert_eq!(given.severed, 0, "severed twice");
            given.severed = 1;
        } else {
            assert_eq!(given.disconnected + given.severed, 0, "ended twice");
            given.disconnected = 1;
        }
        let to = given.to;
        if !process.fabric.end(connection.peer) {
            // It broke by itself, or is ending gently: that is being told.
            return;
        }
        if !self.happens(self.weather.undead) {
            let delay = MS * u32::try_from(self.below(20)).unwrap();
            self.later(delay, Event::Down { at, peer: connection.peer });
        }
        let far = self.processes.iter().position(|process| process.remote.incarnation == to);
        if let Some(far) = far {
            let delay = MS * u32::try_from(self.below(100)).unwrap();
            self.later(delay, Event::Break { at: far, to: own, before: now });
        }
    }
}

pub(super) fn at(port: u16) -> Address {
    format!("10.0.0.1:{port}").parse().unwrap()
}

pub(super) fn at_port(engine: &Engine) -> Address {
    at(engine.port)
}
