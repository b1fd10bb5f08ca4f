//! Engines of tests: a tiny model, any grid, any number of blocks.

use std::sync::Arc;

use kvx_core::backend::PeerInfo;
use kvx_core::card::{Address, Card, EngineName, Offer};
use kvx_core::config::BackendConfig;
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout};
use kvx_core::memory::KeyBlob;
use kvx_core::{Error, Result};

use crate::protocol::peers::{Choosing, Chosen};

pub(super) const FAB: &str = "fab";

/// What an engine is, over all its lives.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) name: EngineName,
    pub(super) grid: Grid,
    pub(super) blocks: u32,
    pub(super) facts: Facts,
    pub(super) model: ModelGeometry,
    pub(super) draft: bool,
    /// Bytes of a key.
    pub(super) key_bytes: usize,
    /// The transports that it takes.
    pub(super) transports: Vec<String>,
    /// What its connections run over.
    pub(super) transport: String,
}

pub(super) fn tiny() -> ModelGeometry {
    ModelGeometry::llama_like(2, 4, 8, Dtype::Bf16).unwrap()
}

impl Plan {
    pub(super) fn new(name: &str, tp: u32, pp: u32) -> Self {
        Self::with_dp(name, tp, pp, 1)
    }

    pub(super) fn with_dp(name: &str, tp: u32, pp: u32, dp: u32) -> Self {
        let model = tiny();
        Self {
            name: EngineName::new(name).unwrap(),
            grid: Grid::new(tp, pp, dp).unwrap(),
            blocks: 16,
            facts: model.facts().unwrap().with(Facts::MODEL, "tiny").unwrap(),
            model,
            draft: false,
            key_bytes: 8,
            transports: Vec::new(),
            transport: "loop".into(),
        }
    }

    pub(super) fn layouts(&self, replica: u32) -> Vec<RankLayout> {
        let mut builder = LayoutBuilder::new(&self.model, NamedLayout::FlashAttentionHnd)
            .blocks(self.blocks)
            .block_tokens(4);
        if self.draft {
            builder = builder.draft(&ModelGeometry::llama_like(1, 4, 8, Dtype::Bf16).unwrap());
        }
        builder.build_replica(self.grid, replica).unwrap()
    }

    pub(super) fn card(&self, layout: RankLayout, life: Incarnation, at: Address) -> Vec<u8> {
        let keys = vec![KeyBlob::new(vec![1; self.key_bytes]).unwrap(); layout.regions().len()];
        let options = BackendConfig::new().with("place", "here");
        let offer = Offer::new(FAB, HandshakeBytes::new(vec![1]).unwrap(), keys).unwrap();
        Card::new(self.name.clone(), life, at, self.facts.clone(), layout)
            .unwrap()
            .with_offer(offer.with_options(options).unwrap())
            .unwrap()
            .encode()
            .unwrap()
    }

    pub(super) fn choosing(&self) -> Box<dyn Choosing> {
        Box::new(TakesFab { transports: self.transports.clone() })
    }
}

#[derive(Debug)]
pub(super) struct TakesFab {
    transports: Vec<String>,
}

impl Choosing for TakesFab {
    fn choose(&self, offers: &[&str]) -> Result<Chosen> {
        assert_eq!(offers, ["fab@here"]);
        Ok(Chosen { backend: FAB, reason: "the only one".into() })
    }

    fn check_transport(&self, info: &PeerInfo) -> Result<(), Error> {
        if self.transports.is_empty() || self.transports.contains(&info.transport) {
            return Ok(());
        }
        Err(Error::unsupported("choose", "the policy does not allow this transport")
            .with_context("transport", &info.transport)
            .with_context("allowed", self.transports.join(", ")))
    }
}

pub(super) fn shared(cards: Vec<Vec<u8>>) -> Vec<Arc<[u8]>> {
    cards.into_iter().map(Arc::from).collect()
}
