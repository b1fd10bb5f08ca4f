use super::*;
use crate::layout::ModelGeometry;

fn llama() -> Facts {
    let model = ModelGeometry::preset("llama-3.1-8b").unwrap();
    model.facts().unwrap().with(Facts::MODEL, model.name()).unwrap()
}

#[test]
fn equal_facts_agree() {
    Facts::check(&llama(), &llama()).unwrap();
    assert_eq!(llama().get(Facts::LAYERS), Some("32"));
    assert_eq!(llama().get("nope"), None);
}

/// Known failures 16 and 17 (vllm#29503, sglang#19398): each field that differs has an error of its own.
#[test]
fn each_fact_that_differs_is_named_with_both_values() {
    let other = [
        (Facts::MODEL, "llama-3.1-70b"),
        (Facts::KV_DTYPE, "fp8_e4m3"),
        (Facts::LAYERS, "80"),
        (Facts::KV_HEADS, "4"),
        (Facts::HEAD_DIM, "64"),
    ];
    for (name, value) in other {
        let changed = llama().with(name, value).unwrap();
        let error = Facts::check(&llama(), &changed).unwrap_err();
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.field, name);
        assert_eq!(mismatch.left, ("producer".into(), llama().get(name).unwrap().into()));
        assert_eq!(mismatch.right, ("consumer".into(), value.into()));
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.context().is_empty(), "{error} names more than {name}");
    }
}

#[test]
fn all_facts_that_differ_are_named() {
    let changed = llama().with(Facts::LAYERS, 80).unwrap().with(Facts::KV_HEADS, 4).unwrap();
    let text = Facts::check(&llama(), &changed).unwrap_err().to_string();
    assert!(text.contains("kv_heads: producer has 8, consumer has 4"), "{text}");
    assert!(text.contains("layers: producer has 32, consumer has 80"), "{text}");
    assert!(!text.contains("head_dim"), "{text}");
}

#[test]
fn a_fact_of_one_side_counts_where_it_is_required() {
    let newer = llama().with("rope", "yarn").unwrap();
    for (producer, consumer) in [(&newer, &llama()), (&llama(), &newer)] {
        let error = Facts::check(producer, consumer).unwrap_err();
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.field, "rope");
        let values = [mismatch.left.1.as_str(), mismatch.right.1.as_str()];
        assert!(values.contains(&"yarn") && values.contains(&"nothing"), "{error}");
    }
    let newer = llama().with_optional("rope", "yarn").unwrap();
    Facts::check(&newer, &llama()).unwrap();
    Facts::check(&llama(), &newer).unwrap();
}

#[test]
fn an_optional_fact_that_both_state_must_be_equal() {
    let left = llama().with_optional(Facts::REVISION, "a").unwrap();
    let right = llama().with_optional(Facts::REVISION, "b").unwrap();
    assert_eq!(Facts::check(&left, &right).unwrap_err().as_mismatch().unwrap().field, "revision");
}

#[test]
fn facts_are_bounded() {
    assert!(Facts::new().with("", 1).is_err());
    assert!(Facts::new().with("a\n", 1).unwrap_err().to_string().contains("control"));
    assert!(Facts::new().with("a", "x".repeat(Facts::MAX_VALUE_BYTES + 1)).is_err());
    let mut facts = Facts::new();
    for i in 0..Facts::MAX_COUNT {
        facts = facts.with(&format!("fact {i}"), i).unwrap();
    }
    assert!(facts.clone().with("one more", 1).unwrap_err().to_string().contains("too many"));
    assert!(facts.with("fact 0", 2).is_ok(), "replacing a fact adds none");
}

#[test]
fn facts_survive_the_wire() {
    let facts = llama().with_optional(Facts::REVISION, "").unwrap();
    let encoded = wire::to_bytes("test", &facts).unwrap();
    assert_eq!(wire::from_bytes::<Facts>("test", "facts", &encoded).unwrap(), facts);
}
