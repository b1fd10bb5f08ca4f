//! What holds for every named layout, geometry and grid.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::super::{ConvPart, SsmGeometry, StateGeometry, Window};
use super::*;

fn any_window() -> impl Strategy<Value = Window> {
    prop_oneof![
        Just(Window::Full),
        (1_u32..50).prop_map(Window::Sliding),
        (1_u32..50).prop_map(Window::Chunked),
    ]
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

fn any_scales() -> impl Strategy<Value = Option<Scales>> {
    let per = prop_oneof![Just(ScalePer::TokenHead), Just(ScalePer::BlockHead)];
    prop::option::of((any_dtype(), per).prop_map(|(dtype, per)| Scales { dtype, per }))
}

fn any_attention(kv_heads: u32) -> impl Strategy<Value = LayerKind> {
    (1_u32..6, 1_u32..6, any_dtype(), any_window(), any_scales()).prop_map(
        move |(key_dim, value_dim, dtype, window, scales)| {
            LayerKind::Attention(AttentionGeometry {
                kv_heads,
                key_dim,
                value_dim,
                dtype,
                window,
                scales,
            })
        },
    )
}

fn any_mla() -> impl Strategy<Value = LayerKind> {
    let scales = (1_u32..3, any_dtype()).prop_map(|(dim, dtype)| IndexScales { dim, dtype });
    let index = (1_u32..6, any_dtype(), prop::option::of(scales))
        .prop_map(|(dim, dtype, scales)| IndexGeometry { dim, dtype, scales });
    (1_u32..10, any_dtype(), prop::option::of(index)).prop_map(|(latent_dim, dtype, index)| {
        LayerKind::Mla(MlaGeometry { latent_dim, dtype, index })
    })
}

fn any_state() -> impl Strategy<Value = LayerKind> {
    let part = (1_u32..5, 1_u32..4).prop_map(|(heads, channels)| ConvPart { heads, channels });
    let ssm = (1_u32..5, 1_u32..6, any_dtype()).prop_map(|(heads, dim, dtype)| SsmGeometry {
        heads,
        dim,
        dtype,
    });
    (prop::collection::vec(part, 1..4), 1_u32..4, any_dtype(), prop::option::of(ssm)).prop_map(
        |(conv, taps, conv_dtype, ssm)| {
            LayerKind::State(StateGeometry { conv, taps, conv_dtype, ssm })
        },
    )
}

/// Attention layers with one number of heads, or MLA layers, mixed with states and layers without a cache.
fn any_model() -> impl Strategy<Value = ModelGeometry> {
    let attention = (1_u32..7).prop_flat_map(|heads| {
        let kind = prop_oneof![
            4 => any_attention(heads),
            1 => any_state(),
            1 => Just(LayerKind::Empty),
        ];
        prop::collection::vec(kind, 1..6)
    });
    let mla = prop::collection::vec(prop_oneof![3 => any_mla(), 1 => any_state()], 1..6);
    prop_oneof![2 => attention, 1 => mla]
        .prop_map(|layers| ModelGeometry::new("any", layers).unwrap())
}

fn any_builder() -> impl Strategy<Value = LayoutBuilder> {
    let named = prop::sample::select(NamedLayout::ALL.to_vec());
    let sizes = (1_u32..5, 1_u32..4, 1_u32..4, 1_u32..4);
    let groups = (any::<bool>(), prop::option::of(1_u32..3), any::<bool>());
    (any_model(), named, sizes, groups).prop_map(|(model, named, sizes, groups)| {
        let (blocks, kernel, ratio, states) = sizes;
        let (by_window, most, whole) = groups;
        let builder = LayoutBuilder::new(&model, named)
            .blocks(blocks)
            .block_tokens(kernel * ratio)
            .kernel_block_tokens(kernel)
            .state_blocks(states)
            .conv_order(if whole { ConvOrder::TapsOutside } else { ConvOrder::ChannelsOutside })
            .group_by_window(by_window)
            .regions(if whole { RegionPolicy::Single } else { RegionPolicy::PerTensor });
        match most {
            Some(most) => builder.group_layers(most),
            None => builder,
        }
    })
}

/// Tensors that each kind of layer has.
fn roles(kind: &LayerKind) -> Vec<Role> {
    let mut roles = match kind {
        LayerKind::Attention(_) => vec![Role::Key, Role::Value],
        LayerKind::Mla(_) => vec![Role::Latent],
        LayerKind::State(state) => {
            (0_u8..).zip(&state.conv).map(|(part, _)| Role::ConvState(part)).collect()
        }
        LayerKind::Empty => vec![],
    };
    match kind {
        LayerKind::Attention(AttentionGeometry { scales: Some(_), .. }) => {
            roles.extend([Role::KeyScale, Role::ValueScale]);
        }
        LayerKind::Mla(MlaGeometry { index: Some(index), .. }) => {
            roles.push(Role::IndexKey);
            roles.extend(index.scales.map(|_| Role::IndexScale));
        }
        LayerKind::State(StateGeometry { ssm: Some(_), .. }) => roles.push(Role::SsmState),
        _ => {}
    }
    roles
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Every layout is valid (`RankLayout::new` checks that nothing overlaps or lies outside), the ranks together hold
    /// every head of every tensor, they agree on the groups, and nothing but padding lies between the tensors.
    #[test]
    fn every_replica_is_whole(
        builder in any_builder(),
        (tp, pp) in (1_u32..6, 1_u32..4),
    ) {
        let ranks = builder.build_replica(Grid::new(tp, pp, 1).unwrap(), 0).unwrap();
        let mut held: BTreeMap<TensorKey, (u32, BTreeSet<u32>)> = BTreeMap::new();
        for rank in &ranks {
            prop_assert_eq!(rank.groups(), ranks[0].groups());
            let mut used = vec![0; rank.regions().len()];
            for tensor in rank.tensors() {
                let (total, heads) = held.entry(tensor.key()).or_default();
                *total = tensor.heads.total;
                heads.extend(tensor.head_range());
                used[tensor.region as usize] += tensor.block_bytes() * u64::from(tensor.block.extent);
            }
            for (region, used) in rank.regions().iter().zip(used) {
                prop_assert!(region.bytes >= used);
                let padded = builder.named == NamedLayout::Pallas;
                prop_assert!(padded || region.bytes <= 3 * used + 7, "{} of {}", used, region.bytes);
            }
        }
        let expected: BTreeSet<TensorKey> = (0_u32..)
            .zip(&builder.layers)
            .flat_map(|(layer, kind)| roles(kind).into_iter().map(move |role| key(layer, role)))
            .collect();
        prop_assert_eq!(held.keys().copied().collect::<BTreeSet<_>>(), expected);
        for (key, (total, heads)) in held {
            prop_assert_eq!(heads, (0..total).collect::<BTreeSet<_>>(), "{}", key);
        }
    }

    /// Bytes of keys, values, latents and states come to what the geometry says, where no head is held twice.
    #[test]
    fn bytes_come_to_what_the_geometry_says(builder in any_builder()) {
        let model = ModelGeometry::new("same", builder.layers.clone()).unwrap();
        let layout = one(&builder);
        let (mut per_token, mut per_state) = (0, 0);
        for tensor in layout.tensors() {
            let group = layout.groups()[tensor.group as usize];
            match (group.kind, tensor.granularity) {
                (GroupKind::State, _) => per_state += tensor.block_bytes(),
                (_, Granularity::Token) => {
                    per_token += tensor.block_bytes() / u64::from(group.kernel_block_tokens);
                }
                _ => {}
            }
        }
        prop_assert_eq!((per_token, per_state), (model.bytes_per_token(), model.state_bytes()));
    }

    /// Every element lies at a multiple of its size, so that an engine can use it where it is.
    #[test]
    fn elements_are_aligned(builder in any_builder(), (tp, pp) in (1_u32..6, 1_u32..4)) {
        let ranks = builder.build_replica(Grid::new(tp, pp, 1).unwrap(), 0).unwrap();
        for tensor in ranks.iter().flat_map(RankLayout::tensors) {
            let axes = [tensor.block, tensor.token, tensor.head, tensor.dim];
            let steps = axes.into_iter().filter(|axis| axis.extent > 1).map(|axis| axis.stride);
            for offset in steps.chain([tensor.base]) {
                prop_assert_eq!(offset % tensor.dtype.bytes(), 0, "{}: {}", tensor.key(), offset);
            }
        }
    }

    /// Layouts survive the wire.
    #[test]
    fn a_layout_is_read_back(builder in any_builder()) {
        let layout = one(&builder);
        let bytes = rmp_serde::to_vec(&layout).unwrap();
        prop_assert_eq!(rmp_serde::from_slice::<RankLayout>(&bytes).unwrap(), layout);
    }
}
