//! Whatever card can be made can be read back.

use kvx_core::card::{Address, Card, CardReader, EngineName, FeatureSet, Features, Offer};
use kvx_core::config::BackendConfig;
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{
    Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankCoords, RankLayout,
};
use kvx_core::memory::KeyBlob;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;

fn layout() -> impl Strategy<Value = RankLayout> {
    let model =
        (1..6_u32, 1..5_u32, 1..9_u32, any::<bool>()).prop_map(|(layers, heads, dim, mla)| {
            if mla {
                ModelGeometry::mla_like(layers, dim * 2, Dtype::F16).unwrap()
            } else {
                ModelGeometry::llama_like(layers, heads, dim * 2, Dtype::Bf16).unwrap()
            }
        });
    let grid = (1..5_u32, 1..3_u32, 1..3_u32);
    (model, select(&NamedLayout::ALL[..]), grid, any::<u32>(), 1..40_u32, 1..40_u32).prop_map(
        |(model, named, (tp, pp, dp), rank, blocks, block_tokens)| {
            let ranks: Vec<RankCoords> =
                Grid::new(tp, pp.min(model.num_layers()), dp).unwrap().ranks().collect();
            let coords = ranks[rank as usize % ranks.len()];
            let builder =
                LayoutBuilder::new(&model, named).blocks(blocks).block_tokens(block_tokens);
            builder.null_block(Some(0)).build(coords).unwrap()
        },
    )
}

fn control() -> impl Strategy<Value = Address> {
    let ip =
        any::<std::net::IpAddr>().prop_filter("dialable", |ip| !ip.to_canonical().is_unspecified());
    prop_oneof![
        (ip, 1..=u16::MAX).prop_map(|(ip, port)| Address::new(ip, port)),
        ("[a-zA-Z][a-z0-9]{0,9}(\\.[a-z][a-z0-9]{0,9}){0,3}", 1..=u16::MAX)
            .prop_map(|(name, port)| format!("{name}:{port}").parse().unwrap()),
    ]
}

fn facts() -> impl Strategy<Value = Facts> {
    btree_map("[a-z_]{1,20}", ("\\PC{0,40}", any::<bool>()), 0..12).prop_map(|all| {
        all.into_iter().fold(Facts::new(), |facts, (name, (value, required))| {
            let stated =
                if required { facts.with(&name, value) } else { facts.with_optional(&name, value) };
            stated.unwrap()
        })
    })
}

fn offers(regions: usize) -> impl Strategy<Value = Vec<Offer>> {
    let keys = vec(vec(any::<u8>(), 0..60), regions);
    let options = btree_map("[a-z]{1,8}", "\\PC{0,16}", 0..4);
    btree_map("[a-z]{1,8}", (vec(any::<u8>(), 0..200), keys, options), 0..4).prop_map(|all| {
        all.into_iter()
            .map(|(backend, (handshake, keys, options))| {
                let keys = keys.into_iter().map(|key| KeyBlob::new(key).unwrap()).collect();
                Offer::new(backend, HandshakeBytes::new(handshake).unwrap(), keys)
                    .and_then(|offer| {
                        offer.with_options(options.into_iter().collect::<BackendConfig>())
                    })
                    .unwrap()
            })
            .collect()
    })
}

fn card() -> impl Strategy<Value = Card> {
    let bits = (any::<u64>(), any::<u64>());
    ("[a-z][a-z0-9-]{0,30}[0-9]", any::<[u8; 16]>(), control(), facts(), layout(), bits)
        .prop_flat_map(|(engine, incarnation, control, facts, layout, (required, optional))| {
            let offers = offers(layout.regions().len());
            let features = Features {
                required: FeatureSet::from_bits(required),
                optional: FeatureSet::from_bits(optional),
            };
            let card = Card::new(
                EngineName::new(engine).unwrap(),
                Incarnation::from_bytes(incarnation),
                control,
                facts,
                layout,
            );
            (Just(card.unwrap().with_features(features)), offers)
        })
        .prop_map(|(card, offers)| {
            offers.into_iter().fold(card, |card, offer| card.with_offer(offer).unwrap())
        })
}

proptest! {
    #[test]
    fn a_card_is_read_as_it_was_written(card in card()) {
        let reader = CardReader::default().with_features(FeatureSet::from_bits(u64::MAX));
        let bytes = card.encode().unwrap();
        prop_assert_eq!(&reader.decode(&bytes).unwrap(), &card);
        prop_assert_eq!(&reader.peek(&bytes).unwrap(), card.head());
        // The same card has the same bytes.
        prop_assert_eq!(reader.decode(&bytes).unwrap().encode().unwrap(), bytes);
    }

    #[test]
    fn an_address_is_read_as_it_is_printed(address in control()) {
        prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
    }

    #[test]
    fn any_text_as_address_is_an_address_in_its_one_form_or_an_error(text in "\\PC{0,40}|[0-9a-fA-F:.%\\[\\]]{0,30}") {
        if let Ok(address) = text.parse::<Address>() {
            prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
        }
    }
}
