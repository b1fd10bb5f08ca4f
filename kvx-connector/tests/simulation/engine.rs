//! An engine of the simulation: the ranks of one side, and their memory.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::protocol::peers::{Choosing, Chosen, Place, Remote};
use kvx_connector::rank::{Rank, RankSetup};
use kvx_core::backend::{PeerInfo, TransferBackend};
use kvx_core::card::{Address, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::{Error, Result};
use kvx_mock::{Fabric, Preset};
use rand::Rng;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::net::{Net, ProcessId, SimChannel};

/// The mock, whoever asks.
#[derive(Debug)]
struct TheMock;

impl Choosing for TheMock {
    fn choose(&self, offers: &[&str]) -> Result<Chosen> {
        match offers.iter().any(|offer| offer.split('@').next() == Some("mock")) {
            true => Ok(Chosen { backend: "mock", reason: "the only one".into() }),
            false => Err(Error::unsupported("choose", "no mock")),
        }
    }

    fn check_transport(&self, _info: &PeerInfo) -> Result<(), Error> {
        Ok(())
    }
}

/// One life of a rank.
pub(crate) struct Life {
    pub(crate) rank: Rank<SimChannel>,
    pub(crate) process: ProcessId,
    pub(crate) regions: Vec<Region>,
}

/// One engine.
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) life: Incarnation,
    pub(crate) lives: Vec<Life>,
    pub(crate) layouts: Vec<RankLayout>,
    pub(crate) next_number: u64,
    /// Its clock, against the world's: parts per thousand.
    rate: u32,
    offset: Duration,
}

pub(crate) fn incarnation(rng: &mut ChaCha8Rng) -> Incarnation {
    let mut bytes = [0; 16];
    rng.fill_bytes(&mut bytes);
    Incarnation::from_bytes(bytes)
}

impl Engine {
    pub(crate) fn new(name: &'static str, layouts: Vec<RankLayout>, rng: &mut ChaCha8Rng) -> Self {
        Self {
            name,
            life: incarnation(rng),
            lives: Vec::new(),
            layouts,
            next_number: 1,
            rate: rng.random_range(900..1100),
            offset: Duration::from_millis(rng.random_range(0..1_000_000)),
        }
    }

    /// What its clock says.
    pub(crate) fn clock(&self, now: Duration) -> Duration {
        self.offset + now * self.rate / 1000
    }

    pub(crate) fn rank_name(&self, rank: usize) -> String {
        format!("{}{rank}", self.name)
    }

    pub(crate) fn address(&self, rank: usize) -> Address {
        let host = if self.name == "p" { 1 } else { 2 };
        Address::new([10, 0, 0, host].into(), 5000 + u16::try_from(rank).unwrap_or(0))
    }

    /// Opens all ranks: a new life of the engine.
    pub(crate) fn open(
        &mut self,
        fabric: &Fabric,
        preset: &Preset,
        again: bool,
        net: &Rc<RefCell<Net>>,
        rng: &mut ChaCha8Rng,
        config: impl Fn(&mut RankSetup),
    ) -> Result<()> {
        self.life = incarnation(rng);
        let mut lives = Vec::new();
        for (number, layout) in self.layouts.iter().enumerate() {
            let name: Arc<str> = self.rank_name(number).into();
            let backend: Arc<dyn TransferBackend> = match again {
                true => fabric.restart(&name)?,
                false => fabric.backend(preset.clone(), name),
            };
            let regions = (layout.regions().iter())
                .map(|spec| Region::host(spec.bytes))
                .collect::<Result<Vec<_>>>()?;
            let engine = EngineName::new(self.name)?;
            let incarnation = backend.incarnation();
            let address = self.address(number);
            let place = Place::from(layout.coords());
            let remote = Remote { engine: engine.clone(), incarnation, rank: Some(place) };
            let process = net.borrow_mut().enter(remote, &address);
            let channel = SimChannel { net: Rc::clone(net), process };
            let mut setup = RankSetup::new(
                (engine, incarnation, self.life),
                address,
                Facts::new(),
                (layout.clone(), regions.clone()),
                vec![backend],
                Box::new(TheMock),
                rng.random(),
            )
            .with_replica(self.layouts.clone());
            config(&mut setup);
            match Rank::new(setup, channel) {
                Ok(rank) => lives.push(Life { rank, process, regions }),
                Err(error) => {
                    // Nobody is to find those who never came to life.
                    let opened = lives.iter().map(|life: &Life| life.process);
                    opened.chain([process]).for_each(|process| net.borrow_mut().kill(process));
                    return Err(error);
                }
            }
        }
        let cards: Vec<Arc<[u8]>> = lives.iter().map(|life| life.rank.card()).collect();
        if let Some(first) = lives.first_mut() {
            first.rank.serve(cards)?;
        }
        self.lives = lives;
        Ok(())
    }
}
