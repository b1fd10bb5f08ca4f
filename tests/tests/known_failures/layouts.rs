//! What is refused before a byte moves.

use kvx_core::ErrorKind;
use kvx_core::facts::Facts;
use kvx_core::layout::{Dtype, LayoutBuilder, RankLayout, RegionSpec};
use kvx_core::memory::{MemoryKind, Region};
use kvx_core::plan::PeerPlan;
use kvx_core::port::Port;
use kvx_mock::{Fabric, Preset};

use crate::common::{NHD, model, pairing, parts_with_regions, scene, side};

#[test]
fn row_16_sglang_19398_another_dtype_is_refused_and_page_0_is_not_accidentally_fine() {
    let bf16 = model(1, 2);
    let fp8 = bf16.clone().with_dtype(Dtype::Fp8E4m3);
    let engine = |model| LayoutBuilder::new(model, NHD).blocks(2).block_tokens(2);
    let scene = scene(side(&engine(&bf16), 1, &[0]), side(&engine(&fp8), 1, &[0]), 2);
    let pairing = pairing(&scene);
    let error =
        PeerPlan::compile(&scene.producer.ranks[0], &scene.consumer.ranks[0], &pairing.pairs()[0])
            .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.field, "layer 0 K dtype");
    assert_eq!((mismatch.left.1.as_str(), mismatch.right.1.as_str()), ("bf16", "fp8_e4m3"));
    // The engines learn it even earlier, from each other's facts.
    let error = Facts::check(&bf16.facts().unwrap(), &fp8.facts().unwrap()).unwrap_err();
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.field, Facts::KV_DTYPE);
    assert!(mismatch.left.1.contains("bf16") && mismatch.right.1.contains("fp8_e4m3"), "{error}");
}

#[test]
fn row_102_mooncake_701_an_empty_region_is_refused_and_leaves_the_others_alone() {
    assert_eq!(Region::host(0).unwrap_err().kind(), ErrorKind::Misuse);

    let builder = LayoutBuilder::new(&model(1, 2), NHD).blocks(2);
    let layout = side(&builder, 1, &[]).ranks.remove(0);
    let mut regions = layout.regions().to_vec();
    regions.push(RegionSpec { bytes: 0, memory: MemoryKind::Host });
    let error = RankLayout::new(parts_with_regions(&layout, regions)).unwrap_err();
    assert!(error.to_string().contains("region 2 is empty"), "{error}");

    // A peer that claims one: none of its regions is added, and the same without it is fine.
    let fabric = Fabric::new(1);
    let port = |name: &str| Port::new(fabric.backend(Preset::rc(), name)).unwrap();
    let (mine, theirs) = (port("mine"), port("theirs"));
    let (_, reply) = theirs.accept(&mine.offer().unwrap()).unwrap();
    let (peer, completion) = mine.complete(&reply).unwrap();
    theirs.finish(&completion).unwrap();
    let key = theirs.key_blob(theirs.register(&Region::host(64).unwrap()).unwrap()).unwrap();
    let error = mine.add_regions(peer, &[(key.clone(), 64), (key.clone(), 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    assert!(error.to_string().contains("index=1"), "{error}");
    assert_eq!(mine.region_count(peer).unwrap(), 0);
    assert_eq!(mine.add_regions(peer, &[(key, 64)]).unwrap(), 0);
}
