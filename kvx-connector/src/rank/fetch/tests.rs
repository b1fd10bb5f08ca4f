//! Which blocks a request that failed names.

use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout};

use super::*;
use crate::protocol::user::Prove;
use crate::protocol::{Attempt, LeaseName, RequestNumber, TransferKey};
use crate::rank::FetchOptions;

const BLOCK: u64 = 16;

/// A request of `range` of 80 tokens, into blocks 10 to 14.
fn fetch(range: Range<u64>) -> (Fetch, RankLayout) {
    let model = ModelGeometry::llama_like(2, 2, 8, Dtype::Bf16).unwrap();
    let builder = LayoutBuilder::new(&model, NamedLayout::FlashAttentionNhd).block_tokens(16);
    let layout =
        builder.blocks(20).build_replica(Grid::new(1, 1, 1).unwrap(), 0).unwrap().remove(0);
    let life = Incarnation::from_bytes([1; 16]);
    let tables = vec![Table { first: 0, ids: (10..15).collect() }];
    let order = FetchOrder {
        request: RequestNumber(1),
        key: TransferKey::new("r").unwrap(),
        engine: "prefill".parse().unwrap(),
        address: "127.0.0.1:1".parse().unwrap(),
        replica: 0,
        lease: LeaseName { owner: life, number: 1, epoch: 0 },
        access: Access::Read,
        attempt: Attempt { user: life, number: 1 },
        tokens: 5 * BLOCK,
        range,
        theirs: tables.clone(),
        ours: tables,
        parts: Vec::new(),
        total: None,
        deadline: Duration::from_secs(1),
        begin: true,
        prove: Prove::EachPart,
        digests: false,
        stages: (0, 0),
        options: FetchOptions::default(),
    };
    (Fetch::new(order, WantId(1), Duration::ZERO, tracing::Span::none()), layout)
}

fn part(number: u32, tokens: Range<u64>, layers: Range<u32>) -> Part {
    Part { number, group: None, layers, tokens }
}

fn unproven(proven: &[u32], parts: &[Part], complete: bool) -> Unproven {
    Unproven { source: 0, proven: proven.to_vec(), parts: parts.to_vec(), complete }
}

fn blocks(range: Range<u64>, unproven: &[Unproven]) -> Vec<u32> {
    let (fetch, layout) = fetch(range);
    fetch.spoilt(unproven, &layout).into_iter().map(|(_, id)| id).collect()
}

/// Parts that the owner announced, with edges inside of blocks.
fn announced() -> Vec<Part> {
    vec![part(0, 0..24, 0..2), part(1, 24..56, 0..2), part(2, 56..80, 0..2)]
}

#[test]
fn parts_that_were_announced_count_as_those_that_were_known_before() {
    let parts = announced();
    let case = |proven: &[u32]| blocks(0..80, &[unproven(proven, &parts, true)]);
    assert_eq!(case(&[]), [10, 11, 12, 13, 14]);
    assert_eq!(case(&[0]), [11, 12, 13, 14], "half of a block is not a block");
    assert_eq!(case(&[0, 1]), [13, 14], "a block of two parts is good when both are");
    assert_eq!(case(&[1]), [10, 11, 13, 14]);
    assert_eq!(case(&[0, 2]), [11, 12, 13]);
    assert_eq!(case(&[0, 1, 2]), [] as [u32; 0]);
}

#[test]
fn where_there_may_be_more_nothing_is_good() {
    assert_eq!(blocks(0..80, &[unproven(&[0, 1], &announced(), false)]), [10, 11, 12, 13, 14]);
    // Nor where parts leave something out, or nothing was ever asked.
    let gap = [part(0, 0..16, 0..2), part(1, 20..80, 0..2)];
    assert_eq!(blocks(0..80, &[unproven(&[0, 1], &gap, true)]), [11]);
    assert_eq!(blocks(0..80, &[]), [10, 11, 12, 13, 14]);
}

#[test]
fn every_layer_and_every_source_counts() {
    let layered = [part(0, 0..80, 0..1), part(1, 0..32, 1..2), part(2, 32..80, 1..2)];
    assert_eq!(blocks(0..80, &[unproven(&[0, 1], &layered, true)]), [12, 13, 14]);
    let (one, other) = (announced(), announced());
    let both = [unproven(&[0, 1], &one, true), unproven(&[1, 2], &other, true)];
    assert_eq!(blocks(0..80, &both), [10, 11, 13, 14]);
}

/// Of what was not asked for nothing is named.
#[test]
fn only_what_was_asked_for_counts() {
    let parts = announced();
    assert_eq!(blocks(24..80, &[unproven(&[1], &parts, true)]), [13, 14]);
    assert_eq!(blocks(16..40, &[]), [11, 12]);
}
