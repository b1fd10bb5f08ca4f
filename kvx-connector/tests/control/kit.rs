//! Sides of a control channel, as the tests want them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvx_connector::control::{
    Allowed, Control, ControlConfig, ControlEvent, Key, RemoteIdentity, Security, SessionId,
};
use kvx_core::Error;
use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;

/// Long enough for a machine that does much else.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) fn key() -> Security {
    Security::with_key(Key::from_bytes([7; 32]))
}

pub(crate) fn config(engine: &str, security: Security) -> ControlConfig {
    let identity = RemoteIdentity {
        engine: EngineName::new(engine).unwrap(),
        incarnation: Incarnation::random().unwrap(),
        rank: None,
    };
    ControlConfig::new(identity, security)
}

pub(crate) fn start(engine: &str, security: Security) -> Side {
    Side::new(config(engine, security))
}

/// The host of this address, at any port.
pub(crate) fn host(address: &str) -> Allowed {
    Allowed::Host(address.parse::<Address>().unwrap().host().clone())
}

/// A control channel, and what it has said that nobody asked for yet.
pub(crate) struct Side {
    pub(crate) control: Control,
    pub(crate) events: VecDeque<ControlEvent>,
}

impl Side {
    pub(crate) fn new(config: ControlConfig) -> Self {
        Self { control: Control::start(config).unwrap(), events: VecDeque::new() }
    }

    pub(crate) fn listen(&self, address: &str) -> Address {
        self.control.listen(&address.parse().unwrap()).unwrap()
    }

    fn pull(&mut self) {
        let mut events = Vec::new();
        self.control.poll(&mut events);
        self.events.extend(events);
    }

    /// The first event that `wanted` takes; the others stay.
    pub(crate) fn event<T>(
        &mut self,
        what: &str,
        mut wanted: impl FnMut(&ControlEvent) -> Option<T>,
    ) -> (T, ControlEvent) {
        let until = Instant::now() + SOON;
        loop {
            self.pull();
            let found = self.events.iter().enumerate().find_map(|(at, it)| Some((at, wanted(it)?)));
            if let Some((at, found)) = found {
                return (found, self.events.remove(at).unwrap());
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "no {what}; there are {} events, first {:?}; {:?}",
                self.events.len(),
                self.events.front(),
                self.control.stats()
            );
            self.control.wait(left).unwrap();
        }
    }

    pub(crate) fn up(&mut self) -> (SessionId, RemoteIdentity) {
        self.event("session that is up", |event| match event {
            ControlEvent::Up { session, remote, .. } => Some((*session, remote.clone())),
            _ => None,
        })
        .0
    }

    /// The next message of a session, before which nothing else of it may come.
    pub(crate) fn message(&mut self, of: SessionId) -> Vec<u8> {
        match self.event("message", |event| (session(event) == of).then_some(())).1 {
            ControlEvent::Message { bytes, .. } => bytes,
            other => panic!("{other:?}"),
        }
    }

    /// How the session ended. What came before is thrown away.
    pub(crate) fn down(&mut self, of: SessionId) -> Error {
        let is_down = |event: &ControlEvent| {
            (session(event) == of && matches!(event, ControlEvent::Down { .. })).then_some(())
        };
        let why = match self.event("end of a session", is_down).1 {
            ControlEvent::Down { why, .. } => why,
            other => panic!("{other:?}"),
        };
        self.events.retain(|event| session(event) != of);
        why
    }

    pub(crate) fn nothing_for(&mut self, time: Duration) {
        std::thread::sleep(time);
        self.pull();
        assert!(self.events.is_empty(), "{:?}", self.events);
    }

    /// `other` dials this one. Each one's number of the session.
    pub(crate) fn joined(&mut self, other: &mut Self) -> (SessionId, SessionId) {
        let address = self.listen("127.0.0.1:0");
        let dialled = other.control.dial(&address, None).unwrap();
        let (there, _) = self.up();
        let (here, _) = other.up();
        assert_eq!(here, dialled);
        (there, here)
    }

    /// A message there and back again.
    pub(crate) fn ask(&mut self, here: SessionId, other: &mut Self, there: SessionId) -> Duration {
        let begun = Instant::now();
        let _ = self.control.send(here, b"ping").unwrap();
        assert_eq!(other.message(there), b"ping");
        let _ = other.control.send(there, b"pong").unwrap();
        assert_eq!(self.message(here), b"pong");
        begun.elapsed()
    }
}

pub(crate) fn session(event: &ControlEvent) -> SessionId {
    match event {
        ControlEvent::Up { session, .. }
        | ControlEvent::Message { session, .. }
        | ControlEvent::Down { session, .. } => *session,
    }
}

/// Memory of this process that is in use, in KiB.
pub(crate) fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What another thread counts is seen a little later.
pub(crate) fn until(control: &Control, what: &str, holds: impl Fn(&Control) -> bool) {
    let begun = Instant::now();
    while !holds(control) {
        assert!(begun.elapsed() < SOON, "{what}: {:?}", control.stats());
        std::thread::sleep(Duration::from_millis(2));
    }
}
