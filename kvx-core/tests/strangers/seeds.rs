//! The seeds of the fuzz targets: kept in the repository, so that fuzzing starts from cards and not from nothing.

use std::fs;
use std::path::Path;

use super::samples;

/// `KVX_BLESS=1` writes them anew. A card of an earlier schema stays, under another name, when the schema changes.
#[test]
fn the_seeds_of_the_fuzz_targets_are_the_samples() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for (target, samples) in [
        ("card", samples::cards()),
        ("layout", samples::layouts()),
        ("config", samples::configs()),
        ("address", samples::addresses()),
    ] {
        let directory = seeds.join(target);
        if std::env::var_os("KVX_BLESS").is_some() {
            fs::create_dir_all(&directory).unwrap();
            for (name, bytes) in &samples {
                fs::write(directory.join(name), bytes).unwrap();
            }
        }
        assert!(!samples.is_empty());
        for (name, bytes) in samples {
            let held = fs::read(directory.join(&name)).unwrap_or_default();
            assert!(held == bytes, "{target}/{name} is not the sample; KVX_BLESS=1 writes it");
        }
    }
}
