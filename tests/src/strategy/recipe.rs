//! A request between two engines, in a few small numbers.

use std::ops::Range;

use kvx_core::Result;
use kvx_core::layout::{LayerKind, ModelGeometry, ScalePer};
use proptest::prelude::*;

use super::engine::EngineRecipe;
use super::tables::tables;
use crate::oracle::{Scene, Side, touched_entries};

/// What a [`Scene`] is made of.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The model that both engines serve.
    pub model: ModelGeometry,
    /// The engine that has the request's cache.
    pub producer: EngineRecipe,
    /// The engine that needs it.
    pub consumer: EngineRecipe,
    /// Tokens that the request has in its cache.
    pub tokens: u64,
    /// Which of them are asked for.
    pub range: Range<u64>,
    /// Which layers are asked for.
    pub layers: Range<u32>,
}

impl Recipe {
    /// Everything of a request of `tokens` tokens.
    #[must_use]
    pub const fn whole(
        model: ModelGeometry,
        producer: EngineRecipe,
        consumer: EngineRecipe,
        tokens: u64,
    ) -> Self {
        Self { model, producer, consumer, tokens, range: 0..tokens, layers: 0..u32::MAX }
    }

    /// Makes layouts and block tables.
    ///
    /// Where something is kept once per kernel block, the consumer gets the producer's kernel block, and the range begins
    /// with a block: other requests are refused, which is tested elsewhere.
    ///
    /// # Errors
    ///
    /// Where an engine's recipe is not one of a valid layout.
    pub fn scene(&self) -> Result<Scene> {
        let (producer, mut consumer) = (&self.producer, self.consumer.clone());
        let mut range = self.range.clone();
        if self.keeps_per_block() {
            consumer.kernel_tokens = producer.kernel_tokens;
            range.start -= range.start % u64::from(consumer.kernel_tokens);
        }
        let mut scene = Scene {
            producer: Side { ranks: producer.ranks(&self.model, self.tokens)?, tables: Vec::new() },
            consumer: Side { ranks: consumer.ranks(&self.model, self.tokens)?, tables: Vec::new() },
            tokens: self.tokens,
            range,
            layers: self.layers.clone(),
        };
        let [from, to] = touched_entries(&scene);
        for (side, touched, recipe) in [
            (&mut scene.producer, from, producer.tables()),
            (&mut scene.consumer, to, consumer.tables()),
        ] {
            let Some(rank) = side.ranks.first() else { continue };
            side.tables = tables(rank, self.tokens, &touched, recipe);
        }
        Ok(scene)
    }

    fn keeps_per_block(&self) -> bool {
        self.model.layers().iter().any(|layer| match layer {
            LayerKind::Attention(layer) => {
                layer.scales.is_some_and(|scales| scales.per == ScalePer::BlockHead)
            }
            _ => false,
        })
    }
}

/// A token range: mostly from some held prefix to the end of the request, sometimes less, sometimes nothing.
fn request() -> impl Strategy<Value = (u64, Range<u64>)> {
    let tokens = prop_oneof![6 => 1_u64..22, 1 => 0_u64..48];
    (tokens, any::<u16>(), any::<u16>(), 0_u8..8).prop_map(|(tokens, a, b, kind)| {
        let (a, b) = (u64::from(a) % (tokens + 1), u64::from(b) % (tokens + 1));
        let range = match kind {
            0..4 => 0..tokens,
            4 | 5 => a..tokens,
            6 => 0..a,
            _ => a.min(b)..a.max(b),
        };
        (tokens, range)
    })
}

fn layers() -> impl Strategy<Value = Range<u32>> {
    prop_oneof![
        3 => Just(0..u32::MAX),
        1 => (0_u32..4, 0_u32..4).prop_map(|(a, b)| a.min(b)..a.max(b) + 1),
    ]
}

/// Requests of `model` between two engines: the whole, or from a prefix that is held on, or a chunk; all layers, or
/// some.
pub fn recipe(
    model: impl Strategy<Value = ModelGeometry>,
    producer: impl Strategy<Value = EngineRecipe>,
    consumer: impl Strategy<Value = EngineRecipe>,
) -> impl Strategy<Value = Recipe> {
    // Half of all pairs have equal blocks, which are moved whole.
    let alike = any::<bool>();
    (model, producer, consumer, request(), layers(), alike).prop_map(
        |(model, producer, mut consumer, (tokens, range), layers, alike)| {
            if alike {
                consumer.kernel_tokens = producer.kernel_tokens;
            }
            Recipe { model, producer, consumer, tokens, range, layers }
        },
    )
}
