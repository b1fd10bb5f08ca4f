//! What cannot be mapped is refused before a byte moves, naming the field and both values.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvx_core::capability::Limits;
use kvx_core::error::Mismatch;
use kvx_core::layout::{
    AttentionGeometry, ConvPart, Dtype, Granularity, Grid, GroupKind, HeadShard, LayerKind,
    LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, RankLayoutParts, ScalePer, Scales,
    SsmGeometry, StateGeometry, TokenShard, Window,
};
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, Request, SegmentList};
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind};

const FLASH: NamedLayout = NamedLayout::FlashAttentionNhd;

fn model() -> ModelGeometry {
    ModelGeometry::llama_like(1, 2, 4, Dtype::Bf16).unwrap()
}

fn rank(model: &ModelGeometry, tokens: u32) -> RankLayout {
    let builder = LayoutBuilder::new(model, FLASH).block_tokens(tokens);
    builder.blocks(4).build_replica(Grid::new(1, 1, 1).unwrap(), 0).unwrap().remove(0)
}

/// The same layout with something changed.
fn changed(layout: &RankLayout, change: impl FnOnce(&mut RankLayoutParts)) -> RankLayout {
    let mut parts = layout.clone().into_parts();
    change(&mut parts);
    RankLayout::new(parts).unwrap()
}

/// Why these two cannot be mapped.
fn refusal(producer: &RankLayout, consumer: &RankLayout) -> Error {
    let (from, to) = (std::slice::from_ref(producer), std::slice::from_ref(consumer));
    let pairing = match Pairing::new(from, to, 0) {
        Ok(pairing) => pairing,
        Err(error) => return error,
    };
    pairing
        .pairs()
        .iter()
        .find_map(|pair| PeerPlan::compile(producer, consumer, pair).err())
        .unwrap()
}

/// Refused both ways, with field and values as given; the message says the same.
fn assert_refused(producer: &RankLayout, consumer: &RankLayout, field: &str, values: [&str; 2]) {
    for (from, to, values) in
        [(producer, consumer, values), (consumer, producer, [values[1], values[0]])]
    {
        let error = refusal(from, to);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let Some(Mismatch { field: named, left, right }) = error.as_mismatch() else {
            unreachable!("no mismatch: {error}")
        };
        assert!(named.contains(field), "{field} is not in {named}");
        assert_eq!((left.0.as_ref(), right.0.as_ref()), ("producer", "consumer"));
        assert_eq!([left.1.as_str(), right.1.as_str()], values, "{error}");
        let text = error.to_string();
        assert!([field, values[0], values[1]].iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn another_dtype() {
    let fp8 = rank(&model().with_dtype(Dtype::Fp8E4m3), 2);
    assert_refused(&rank(&model(), 2), &fp8, "layer 0 K dtype", ["bf16", "fp8_e4m3"]);
    // As wide, and yet another.
    let f16 = rank(&model().with_dtype(Dtype::F16), 2);
    assert_refused(&rank(&model(), 2), &f16, "layer 0 K dtype", ["bf16", "f16"]);
}

#[test]
fn another_width() {
    let wide = rank(&model().with_head_dim(8).unwrap(), 2);
    assert_refused(&rank(&model(), 2), &wide, "layer 0 K dim", ["4", "8"]);
}

#[test]
fn another_number_of_heads() {
    let more = rank(&ModelGeometry::llama_like(1, 3, 4, Dtype::Bf16).unwrap(), 2);
    assert_refused(&rank(&model(), 2), &more, "layer 0 K heads", ["2", "3"]);
    // Ranks of one engine that disagree.
    let one = changed(&rank(&model(), 2), |parts| {
        for tensor in &mut parts.tensors {
            tensor.heads = HeadShard { first: 0, total: 4 };
        }
    });
    let error = Pairing::new(&[rank(&model(), 2), one], &[rank(&model(), 2)], 0).unwrap_err();
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!((mismatch.left.0.as_ref(), mismatch.right.0.as_ref()), ("producer", "producer"));
    assert_eq!((mismatch.left.1.as_str(), mismatch.right.1.as_str()), ("2", "4"));
}

#[test]
fn heads_that_no_rank_holds() {
    let half = changed(&rank(&model(), 2), |parts| {
        for tensor in &mut parts.tensors {
            tensor.head.extent = 1;
        }
    });
    let error = refusal(&half, &rank(&model(), 2));
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.field, "layer 0 K heads 1..2");
    // The other way nothing is missing: the consumer holds less.
    let (from, to) = (rank(&model(), 2), half);
    Pairing::new(std::slice::from_ref(&from), std::slice::from_ref(&to), 0).unwrap();
}

#[test]
fn another_window() {
    let window = |window| {
        changed(&rank(&model(), 2), |parts| {
            for tensor in &mut parts.tensors {
                tensor.window = window;
            }
        })
    };
    let sliding = window(Window::Sliding(3));
    assert_refused(
        &sliding,
        &window(Window::Sliding(4)),
        "layer 0 K window",
        ["sliding 3", "sliding 4"],
    );
    assert_refused(
        &sliding,
        &window(Window::Chunked(3)),
        "layer 0 K window",
        ["sliding 3", "chunked 3"],
    );
    // A side that keeps all tokens has the window's too.
    let full = rank(&model(), 2);
    for (from, to) in [(&sliding, &full), (&full, &sliding)] {
        let pairing =
            Pairing::new(std::slice::from_ref(from), std::slice::from_ref(to), 0).unwrap();
        PeerPlan::compile(from, to, &pairing.pairs()[0]).unwrap();
    }
}

#[test]
fn a_tensor_that_only_one_side_has() {
    let scaled = model().with_scales(Some(Scales { dtype: Dtype::F32, per: ScalePer::TokenHead }));
    let (plain, scaled) = (rank(&model(), 2), rank(&scaled, 2));
    assert_refused(&plain, &scaled, "layer 0 K_scale", ["no such tensor", "it"]);
    // Another layer.
    let deeper = rank(&model().with_layers(2).unwrap(), 2);
    assert_refused(&deeper, &plain, "layer 1 K", ["it", "no such tensor"]);
    // A whole cache group, here of a layer with a window.
    let window = AttentionGeometry::new(1, 2, Dtype::Bf16).with_window(Window::Sliding(8));
    let mut layers = model().layers().to_vec();
    layers.push(LayerKind::Attention(window));
    let two_groups = LayoutBuilder::new(&ModelGeometry::new("two groups", layers).unwrap(), FLASH)
        .block_tokens(2)
        .group_by_window(true)
        .build_replica(Grid::new(1, 1, 1).unwrap(), 0)
        .unwrap();
    assert_eq!(two_groups[0].groups().len(), 2);
    assert_refused(&plain, &two_groups[0], "layer 1 K", ["no such tensor", "it"]);
    // Declared local-only, it is no matter.
    let declared = changed(&deeper, |parts| {
        for tensor in parts.tensors.iter_mut().filter(|tensor| tensor.layer == 1) {
            tensor.local_only = true;
        }
    });
    Pairing::new(std::slice::from_ref(&declared), std::slice::from_ref(&plain), 0).unwrap();
}

#[test]
fn another_granularity() {
    let per = |per| rank(&model().with_scales(Some(Scales { dtype: Dtype::F32, per })), 2);
    assert_refused(
        &per(ScalePer::TokenHead),
        &per(ScalePer::BlockHead),
        "layer 0 K_scale granularity",
        ["per token", "per block"],
    );
}

#[test]
fn scales_per_block_of_other_blocks() {
    let scaled = model().with_scales(Some(Scales { dtype: Dtype::F32, per: ScalePer::BlockHead }));
    assert_refused(&rank(&scaled, 2), &rank(&scaled, 3), "layer 0 K_scale block size", ["2", "3"]);
}

#[test]
fn another_kind_of_group() {
    let state = StateGeometry {
        conv: vec![ConvPart { heads: 2, channels: 1 }],
        taps: 2,
        conv_dtype: Dtype::F32,
        ssm: Some(SsmGeometry { heads: 2, dim: 2, dtype: Dtype::F32 }),
    };
    let state = rank(&ModelGeometry::new("state", vec![LayerKind::State(state)]).unwrap(), 2);
    let attention = changed(&state, |parts| parts.groups[0].kind = GroupKind::Attention);
    assert_refused(&state, &attention, "layer 0 conv_state.0 group kind", ["state", "attention"]);
    assert!(state.tensors().iter().all(|tensor| tensor.granularity == Granularity::Block));
}

#[test]
fn context_parallelism() {
    let plain = rank(&model(), 2);
    let shared = changed(&plain, |parts| {
        for tensor in &mut parts.tensors {
            tensor.tokens = TokenShard::Interleaved { run: 16, ranks: 2, rank: 0 };
        }
    });
    assert_refused(
        &plain,
        &shared,
        "layer 0 K context parallelism",
        ["none", "2 ranks in runs of 16"],
    );
}

/// A pair that was made for other layouts is the caller's mistake.
#[test]
fn a_pair_of_other_layouts() {
    let (from, to) = ([rank(&model(), 2)], [rank(&model(), 2)]);
    let pairing = Pairing::new(&from, &to, 0).unwrap();
    let latent = rank(&ModelGeometry::mla_like(1, 4, Dtype::Bf16).unwrap(), 2);
    let error = PeerPlan::compile(&latent, &to[0], &pairing.pairs()[0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("layer 0 K"), "{error}");
}

/// What is wrong with one request is named too, and leaves an empty list.
#[test]
fn a_request_that_cannot_be_served() {
    let (from, to) = ([rank(&model(), 2)], [rank(&model(), 2)]);
    let pairing = Pairing::new(&from, &to, 0).unwrap();
    let plan = PeerPlan::compile(&from[0], &to[0], &pairing.pairs()[0]).unwrap();
    let mut list = SegmentList::new();
    let good = [BlockTable::new(&[1, 2])];
    plan.segments(&Request::whole(4, &good, &good), Mode::Read, &Limits::unlimited(), &mut list)
        .unwrap();
    assert!(!list.is_empty());
    let mut refuse = |request: Request<'_>, limits: &Limits, words: &[&str]| {
        let error = plan.segments(&request, Mode::Read, limits, &mut list).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert!(list.is_empty());
    };
    let any = &Limits::unlimited();
    let (short, high, twice) =
        ([BlockTable::new(&[1])], [BlockTable::new(&[1, 4])], [BlockTable::new(&[3, 3])]);
    refuse(Request::whole(4, &short, &good), any, &["side=producer", "group=0", "table_entry=1"]);
    refuse(Request::whole(4, &good, &short), any, &["side=consumer", "group=0", "table_entry=1"]);
    refuse(Request::whole(4, &good, &high), any, &["side=consumer", "id=4", "blocks=4"]);
    refuse(Request::whole(4, &good, &twice), any, &["twice", "side=consumer", "id=3"]);
    refuse(Request::whole(4, &[], &good), any, &["side=producer", "no block table"]);
    let request = Request::whole(4, &good, &good);
    refuse(request.clone().with_range(1..5), any, &["range=1..5", "tokens=4"]);
    let mut none = Limits::unlimited();
    none.max_segment_bytes = 0;
    refuse(request, &none, &["max_segment_bytes"]);
}
