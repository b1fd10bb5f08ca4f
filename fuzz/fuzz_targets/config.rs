//! Any text as a Hugging Face `config.json`.

#![no_main]

use kvx_core::ErrorKind;
use kvx_core::layout::ModelGeometry;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match ModelGeometry::from_hf_config(text) {
        Ok(model) => {
            assert!(model.num_layers() > 0);
            model.facts().expect("a geometry can be stated");
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{error}"),
    }
});
