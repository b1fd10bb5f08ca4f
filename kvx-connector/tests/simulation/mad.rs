//! A member of the deployment that has the key and says anything: what others say, changed at random, and said again.

use std::cell::RefCell;
use std::rc::Rc;

use kvx_connector::protocol::peers::{Place, Remote, SessionId};
use kvx_connector::rank::{Channel as _, ChannelEvent};
use kvx_core::Result;
use kvx_core::card::{Address, EngineName};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::engine::incarnation;
use crate::net::{Net, SimChannel};

/// How much of it was heard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) said: u64,
    pub(crate) sessions: u64,
    /// Frames that the lives that there are at the end could not read.
    pub(crate) bad: u64,
}

impl Heard {
    pub(crate) const fn add(&mut self, other: &Self) {
        self.said += other.said;
        self.sessions += other.sessions;
        self.bad += other.bad;
    }
}

pub(crate) struct Mad {
    channel: SimChannel,
    rng: ChaCha8Rng,
    sessions: Vec<SessionId>,
    dialling: Vec<Address>,
    pub(crate) said: u64,
    pub(crate) sessions_had: u64,
}

impl Mad {
    pub(crate) fn enter(net: &Rc<RefCell<Net>>, mut rng: ChaCha8Rng) -> Result<Self> {
        let place = Place { replica: 0, rank: 0 };
        let engine = EngineName::new("x")?;
        let remote = Remote { engine, incarnation: incarnation(&mut rng), rank: Some(place) };
        let address = Address::new([10, 0, 0, 3].into(), 5000);
        let process = net.borrow_mut().enter(remote, &address);
        let channel = SimChannel { net: Rc::clone(net), process };
        let (sessions, dialling) = (Vec::new(), Vec::new());
        Ok(Self { channel, rng, sessions, dialling, said: 0, sessions_had: 0 })
    }

    /// Says so many things to everybody.
    pub(crate) fn speak(&mut self, victims: &[Address], count: u32) {
        let mut events = Vec::new();
        self.channel.poll(&mut events);
        for event in events {
            match event {
                ChannelEvent::Up { session, dialled, .. } => {
                    self.sessions.push(session);
                    self.sessions_had += 1;
                    self.dialling.retain(|address| Some(address) != dialled.as_ref());
                }
                ChannelEvent::DialFailed { address, .. } => {
                    self.dialling.retain(|one| *one != address);
                }
                ChannelEvent::Down { session, .. } => self.sessions.retain(|one| *one != session),
                _ => {}
            }
        }
        if self.sessions.len() < 2 * victims.len() {
            for address in victims {
                if !self.dialling.contains(address) {
                    self.dialling.push(address.clone());
                    self.channel.dial(address, None);
                }
            }
        }
        for session in self.sessions.clone() {
            for _ in 0..count {
                let Some(bytes) = self.frame() else { return };
                // It may have been closed for what was said before.
                self.said += u64::from(self.channel.send(session, &bytes));
            }
        }
    }

    /// Something that was said, or nearly that.
    fn frame(&mut self) -> Option<Vec<u8>> {
        let net = self.channel.net.borrow();
        let heard = net.tap.as_ref().filter(|heard| !heard.is_empty())?;
        let mut bytes = heard[self.rng.random_range(0..heard.len())].clone();
        let other = heard[self.rng.random_range(0..heard.len())].clone();
        drop(net);
        for _ in 0..self.rng.random_range(0..4) {
            self.change(&mut bytes, &other);
        }
        Some(bytes)
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let rng = &mut self.rng;
        if bytes.is_empty() {
            return bytes.push(rng.random());
        }
        let at = rng.random_range(0..bytes.len());
        match rng.random_range(0..8) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            // Heads of MessagePack, and the ends of numbers.
            2 => {
                bytes[at] = [0, 1, 0x7f, 0x80, 0xc1, 0xcf, 0xdd, 0xdf, 0xff][rng.random_range(0..9)]
            }
            3 => bytes.truncate(at),
            4 => drop(bytes.remove(at)),
            5 => bytes.insert(at, rng.random()),
            6 => bytes[0] = rng.random_range(0..6),
            _ => {
                let from = rng.random_range(0..=other.len().saturating_sub(1));
                let count = rng.random_range(0..32).min(other.len() - from);
                let end = (at + count).min(bytes.len());
                bytes.splice(at..end, other[from..from + count].iter().copied());
            }
        }
    }
}
