//! Tests of the engines: the allocator against a model of memory, filling and checking against the layouts' formula.

use std::collections::{BTreeMap, BTreeSet};

use kvx_core::layout::{
    AttentionGeometry, Dtype, GroupKind, LayerKind, ModelGeometry, NamedLayout, RankLayout,
    ScalePer, Scales, Tensor, Window,
};
use kvx_core::memory::Region;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::pool::{Lease, Pool};
use super::tags::Prompt;
use super::watch::Watch;
use super::work::{Share, Worker};
use crate::shape::Shape;
use crate::trace::{Generator, generate};

/// Sliding and full layers, and a state.
fn hybrid() -> ModelGeometry {
    let nemotron = ModelGeometry::preset("nemotron-h-8b").unwrap();
    let state = nemotron.layers().iter().find(|kind| matches!(kind, LayerKind::State(_))).unwrap();
    let attention = AttentionGeometry::new(2, 8, Dtype::Bf16);
    let sliding = |tokens| attention.clone().with_window(Window::Sliding(tokens));
    ModelGeometry::new(
        "hybrid",
        vec![
            LayerKind::Attention(sliding(100)),
            LayerKind::Attention(attention.clone()),
            state.clone(),
            LayerKind::Attention(attention.clone().with_window(Window::Chunked(700))),
            LayerKind::Attention(sliding(1500)),
        ],
    )
    .unwrap()
}

fn ranks(model: &ModelGeometry, shape: &str, blocks: u32) -> Vec<RankLayout> {
    let base = Shape::new(1, NamedLayout::FlashAttentionHnd, 16).unwrap();
    base.changed_by("--test", shape).unwrap().ranks(model, blocks, Some(6), 0).unwrap()
}

/// What each position of each block holds: by group, window, block and slot.
#[derive(Default)]
struct Shadow(BTreeMap<(usize, Window, u32, u64), u64>);

impl Shadow {
    /// The positions of the tokens that a window needs.
    fn places<'a>(
        layout: &'a RankLayout,
        prompt: &'a Prompt,
        lease: &'a Lease,
    ) -> impl Iterator<Item = (u64, (usize, Window, u32, u64))> + 'a {
        // Tensors of one group and window have the same places.
        let mut seen = BTreeSet::new();
        let distinct = move |tensor: &&Tensor| seen.insert((tensor.group, tensor.window));
        layout.tensors().iter().filter(distinct).flat_map(move |tensor| {
            let index = tensor.group as usize;
            let group = &layout.groups()[index];
            let table = &lease.tables[index];
            let size = u64::from(group.block_tokens);
            let needed = match group.kind {
                GroupKind::Attention => tensor.window.first_needed(prompt.tokens()),
                _ => prompt.tokens() - 1,
            };
            (needed..prompt.tokens()).map(move |token| {
                let block = table[usize::try_from(token / size).unwrap()];
                assert_ne!(block, 0, "token {token} of {} has the null block", tensor.key());
                (token, (index, tensor.window, block, token % size))
            })
        })
    }

    fn write(
        &mut self,
        layout: &RankLayout,
        prompt: &Prompt,
        lease: &Lease,
    ) -> BTreeSet<(usize, u32)> {
        let mut written = BTreeSet::new();
        for (token, place) in Self::places(layout, prompt, lease) {
            if token >= lease.reused {
                self.0.insert(place, prompt.token(token));
                written.insert((place.0, place.2));
            }
        }
        written
    }

    fn check(&self, layout: &RankLayout, prompt: &Prompt, lease: &Lease) {
        for (token, place) in Self::places(layout, prompt, lease) {
            assert_eq!(
                self.0.get(&place),
                Some(&prompt.token(token)),
                "token {token} at {place:?}"
            );
        }
    }
}

/// Requests come and go; whatever is kept and evicted, each finds all of its tokens where its block tables say, and nobody
/// writes into another's blocks.
#[test]
fn leases_are_right_whatever_comes_and_goes() {
    let dense = ModelGeometry::llama_like(1, 1, 8, Dtype::Bf16).unwrap();
    for (model, shape) in [
        (&dense, "block=16"),
        (&dense, "block=48"),
        (&dense, "block=1024"),
        (&hybrid(), "block=32"),
        (&hybrid(), "groups=window,block=16"),
        (&hybrid(), "groups=window,block=96"),
    ] {
        for seed in 0..3 {
            let reused = come_and_go(model, shape, seed);
            assert!(reused > 0, "{shape}, seed {seed}: no prefix was ever used again");
        }
    }
}

fn come_and_go(model: &ModelGeometry, shape: &str, seed: u64) -> u64 {
    println!("{} {shape}, seed {seed}", model.name());
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let block: u32 = shape.rsplit("block=").next().unwrap().parse().unwrap();
    let blocks = 9_000 / block + 40;
    let layout = ranks(model, shape, blocks).remove(0);
    let mut pool = Pool::new(std::slice::from_ref(&layout));
    pool.check("--test", 5000).unwrap();
    let mut shadow = Shadow::default();
    let mut active: Vec<(Prompt, Lease)> = Vec::new();
    let mut reused = 0;
    let mut scattered = false;
    for entry in generate(Generator { seed, longest: 4000 }, 80) {
        let prompt = Prompt::new(seed, entry.input_length, &entry.hash_ids);
        let mut lease = loop {
            match pool.lease(&prompt) {
                Some(lease) => break lease,
                None => {
                    assert!(!active.is_empty(), "an empty pool has no room");
                    let (prompt, lease) = active.swap_remove(random.random_range(0..active.len()));
                    pool.release(&prompt, lease);
                }
            }
        };
        assert!(lease.reused <= prompt.tokens());
        let attention = &lease.tables[0];
        scattered |= attention.windows(2).any(|pair| pair[0] != 0 && pair[0].abs_diff(pair[1]) > 1);
        // Blocks of its own are nobody else's, in any group.
        for (other, held) in &active {
            for (group, own) in lease.own.iter().enumerate() {
                assert!(
                    own.iter().all(|id| !held.tables[group].contains(id)),
                    "{}",
                    other.tokens()
                );
            }
        }
        let written = shadow.write(&layout, &prompt, &lease);
        let own = |place: &(usize, u32)| lease.own[place.0].contains(&place.1);
        assert!(written.iter().all(own), "wrote into a block that is not its own");
        shadow.check(&layout, &prompt, &lease);
        reused += lease.reused;
        pool.keep(&prompt, &mut lease);
        active.push((prompt, lease));
        if random.random_bool(0.4) {
            let (prompt, lease) = active.swap_remove(random.random_range(0..active.len()));
            // Until it ends, whatever came after it has left its blocks alone.
            shadow.check(&layout, &prompt, &lease);
            pool.release(&prompt, lease);
        }
    }
    assert!(scattered, "blocks stayed neighbours");
    for (prompt, lease) in active {
        shadow.check(&layout, &prompt, &lease);
        pool.release(&prompt, lease);
    }
    // Nothing is lost: one request may have nearly all blocks.
    let all = u64::from(blocks - 1) * u64::from(block);
    let ids: Vec<u64> = (0..all.div_ceil(512)).map(|id| 1_000_000 + id).collect();
    let lease = pool.lease(&Prompt::new(seed, all, &ids)).unwrap();
    let distinct: BTreeSet<u32> = lease.tables.last().unwrap().iter().copied().collect();
    assert!(lease.reused == 0 && !distinct.is_empty());
    reused
}

#[test]
fn a_request_too_long_for_the_pool_is_refused_with_the_number_of_blocks() {
    let model = ModelGeometry::llama_like(1, 1, 8, Dtype::Bf16).unwrap();
    let pool = Pool::new(&ranks(&model, "block=16", 11));
    pool.check("--producer", 160).unwrap();
    let error = pool.check("--producer", 161).unwrap_err();
    assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
    assert!(error.to_string().contains("give blocks=12 or more"), "{error}");
}

#[test]
fn the_whole_prompt_can_be_held_already_but_not_its_state() {
    let dense = ModelGeometry::llama_like(1, 1, 8, Dtype::Bf16).unwrap();
    for (model, reused) in [(&dense, 1024), (&hybrid(), 512)] {
        let mut pool = Pool::new(&ranks(model, "block=32", 400));
        let prompt = Prompt::new(0, 1024, &[1, 2]);
        let mut first = pool.lease(&prompt).unwrap();
        assert_eq!(first.reused, 0);
        // Before it is kept, nobody can use it.
        assert_eq!(pool.lease(&prompt).unwrap().reused, 0);
        pool.keep(&prompt, &mut first);
        let second = pool.lease(&prompt).unwrap();
        assert_eq!(second.reused, reused, "{}", model.name());
        let other = pool.lease(&Prompt::new(0, 1024, &[1, 3])).unwrap();
        assert_eq!(other.reused, 512);
    }
}

#[test]
fn bystanders_are_the_null_block_and_neighbours() {
    let model = ModelGeometry::llama_like(1, 1, 8, Dtype::Bf16).unwrap();
    let pool = Pool::new(&ranks(&model, "block=16", 20));
    let written = [BTreeSet::from([5, 6, 9])];
    assert_eq!(pool.bystanders(&written, 4), [vec![0, 4, 7, 8]]);
    assert_eq!(pool.bystanders(&written, 100)[0].len(), 17);
}

fn memory(layout: &RankLayout) -> Vec<Region> {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let fill = |bytes: u64| {
        let region = Region::host(bytes).unwrap();
        let noise: Vec<u8> = (0..bytes).map(|_| random.random()).collect();
        region.write_at(0, &noise).unwrap();
        region
    };
    layout.regions().iter().map(|region| region.bytes).map(fill).collect()
}

/// Where an element lies, by the formula of the layout's documentation.
fn place(tensor: &Tensor, [block, token, head, dim]: [u64; 4]) -> u64 {
    tensor.base
        + block * tensor.block.stride
        + token * tensor.token.stride
        + head * tensor.head.stride
        + dim * tensor.dim.stride
}

/// Filling a request makes its check pass, and touches nothing else; one flipped bit anywhere makes it fail, with the right
/// coordinates.
#[test]
fn one_wrong_bit_is_found_and_named() {
    let small = AttentionGeometry::new(4, 8, Dtype::Bf16);
    let layers = |scales| {
        let layer = AttentionGeometry { scales, ..small.clone() };
        vec![LayerKind::Attention(layer.clone()), LayerKind::Attention(layer)]
    };
    let scales = |per| Some(Scales { dtype: Dtype::F32, per });
    let models = [
        ModelGeometry::new("plain", layers(None)).unwrap(),
        ModelGeometry::new("scaled", layers(scales(ScalePer::TokenHead))).unwrap(),
        ModelGeometry::new("blocked", layers(scales(ScalePer::BlockHead))).unwrap(),
        ModelGeometry::mla_like(2, 12, Dtype::Fp8E4m3).unwrap(),
    ];
    for model in &models {
        for named in NamedLayout::ALL {
            let shape = format!("tp=2,layout={named},block=8,kernel=4");
            let layout = ranks(model, &shape, 12).remove(1);
            one_wrong_bit(&layout, &format!("{} {named}", model.name()));
        }
    }
}

fn one_wrong_bit(layout: &RankLayout, name: &str) {
    let regions = memory(layout);
    let prompt = Prompt::new(3, 21, &[7]);
    let tables = vec![vec![9, 2, 5]];
    let share = Share { prompt: &prompt, tables: &tables };
    let mut worker = Worker::default();
    let others = Watch::new(layout, &regions, &[vec![0, 1, 3, 4, 6, 7, 8, 10, 11]]).unwrap();
    assert!(worker.check(layout, &regions, share).unwrap().wrong > 0, "{name}");
    worker.fill(layout, &regions, share, 0).unwrap();
    assert_eq!(others.changed(layout, &regions).unwrap(), [], "{name}");
    let good = worker.check(layout, &regions, share).unwrap();
    assert_eq!((good.wrong, good.told.len()), (0, 0), "{name}");
    let per_block = |tensor: &Tensor| tensor.token.extent == 1;
    let count = |tensor: &Tensor| {
        // 21 tokens are six kernel blocks of four.
        let positions = if per_block(tensor) { 6 } else { 21 };
        positions * u64::from(tensor.head.extent) * u64::from(tensor.dim.extent)
    };
    assert_eq!(good.elements, layout.tensors().iter().map(count).sum::<u64>(), "{name}");

    let mut random = ChaCha8Rng::seed_from_u64(11);
    for tensor in layout.tensors() {
        let token = random.random_range(0..21_u64);
        let (head, dim) = (
            random.random_range(0..u64::from(tensor.head.extent)),
            random.random_range(0..u64::from(tensor.dim.extent)),
        );
        let block = tables[0][(token / 8) as usize];
        let kernel = u64::from(block) * 2 + token % 8 / 4;
        let slot = if per_block(tensor) { 0 } else { token % 4 };
        let at = place(tensor, [kernel, slot, head, dim]);
        let region = &regions[tensor.region as usize];
        let mut byte = [0];
        region.read_at(at, &mut byte).unwrap();
        region.write_at(at, &[byte[0] ^ 1]).unwrap();
        let bad = worker.check(layout, &regions, share).unwrap();
        region.write_at(at, &byte).unwrap();
        assert_eq!((bad.wrong, bad.told.len()), (1, 1), "{name} {}", tensor.key());
        let told = &bad.told[0];
        assert_eq!((told.layer, &*told.role), (tensor.layer, &*tensor.role.to_string()), "{name}");
        assert_eq!(told.block, block, "{name}");
        assert_eq!(told.token, (!per_block(tensor)).then_some(token), "{name}");
        assert_eq!(u64::from(told.head), u64::from(tensor.heads.first) + head, "{name}");
        assert_eq!(u64::from(told.dim), dim, "{name}");
    }
}

/// Of a layer with a window exactly the tokens that it needs are filled and checked.
#[test]
fn windows_are_filled_and_checked_to_the_token() {
    for (window, first) in [(Window::Sliding(10), 12), (Window::Chunked(8), 16), (Window::Full, 0)]
    {
        let layer = AttentionGeometry::new(1, 8, Dtype::Bf16).with_window(window);
        let model = ModelGeometry::new("window", vec![LayerKind::Attention(layer)]).unwrap();
        let layout = ranks(&model, "block=8", 9).remove(0);
        let regions = memory(&layout);
        let prompt = Prompt::new(1, 21, &[1]);
        let tables = vec![vec![3, 1, 7]];
        let share = Share { prompt: &prompt, tables: &tables };
        let before = Watch::new(
            &layout,
            &regions,
            &[(0..9).filter(|id| *id != 7 && *id != 1 && *id != 3).collect()],
        );
        let mut worker = Worker::default();
        worker.fill(&layout, &regions, share, 0).unwrap();
        let checked = worker.check(&layout, &regions, share).unwrap();
        assert_eq!((checked.wrong, checked.elements), (0, 2 * 8 * (21 - first)), "{window}");
        assert_eq!(before.unwrap().changed(&layout, &regions).unwrap(), []);
        // Token by token: a changed one is found if it is needed, and else is not.
        let tensor = &layout.tensors()[0];
        for token in 0..21 {
            let at = place(tensor, [u64::from(tables[0][token / 8]), token as u64 % 8, 0, 0]);
            let mut byte = [0];
            regions[0].read_at(at, &mut byte).unwrap();
            regions[0].write_at(at, &[byte[0] ^ 1]).unwrap();
            let wrong = worker.check(&layout, &regions, share).unwrap().wrong;
            regions[0].write_at(at, &byte).unwrap();
            assert_eq!(wrong, u64::from(token as u64 >= first), "{window}, token {token}");
        }
    }
}

#[test]
fn a_watched_block_that_changes_is_named() {
    let model = ModelGeometry::llama_like(2, 4, 8, Dtype::Bf16).unwrap();
    let layout = ranks(&model, "block=8", 6).remove(0);
    let regions = memory(&layout);
    let watch = Watch::new(&layout, &regions, &[vec![0, 4]]).unwrap();
    let tensor = &layout.tensors()[3];
    let at = place(tensor, [4, 7, 3, 7]) + 1;
    regions[tensor.region as usize].write_at(at, &[1]).unwrap();
    let changed = watch.changed(&layout, &regions).unwrap();
    assert_eq!(changed.len(), 1);
    assert_eq!((changed[0].layer, &*changed[0].role, changed[0].block), (1, "V", 4));
}
