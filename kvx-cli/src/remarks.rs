//! What is so without being asked for, in a line each.

use std::collections::BTreeSet;

use kvx_core::layout::{GroupKind, RankLayout, Role};

/// Most ranks that a remark names.
const MAX_NAMED: usize = 8;

/// Producer ranks that none of `givers` is: they hold what others hold as well.
pub(crate) fn idle(producers: usize, givers: &BTreeSet<usize>) -> Option<String> {
    let idle: Vec<usize> = (0..producers).filter(|rank| !givers.contains(rank)).collect();
    let (word, verbs) = match idle.len() {
        0 => return None,
        1 => ("rank", "holds copies and gives"),
        _ => ("ranks", "hold copies and give"),
    };
    Some(format!("producer {word} {} {verbs} nothing", named(&idle)))
}

/// How an engine's ranks split the attention heads, where they do not split them evenly.
pub(crate) fn uneven(side: &str, ranks: &[RankLayout]) -> Option<String> {
    let counts: Vec<usize> = ranks
        .iter()
        .filter(|rank| rank.coords().pp == 0)
        .filter_map(|rank| {
            let keys = |tensor: &&kvx_core::layout::Tensor| {
                tensor.role == Role::Key
                    && rank.groups()[tensor.group as usize].kind == GroupKind::Attention
            };
            rank.tensors().iter().find(keys).map(|tensor| tensor.head.extent as usize)
        })
        .collect();
    let even = counts.windows(2).all(|pair| pair[0] == pair[1]);
    (!even).then(|| format!("{side}: tp={} splits the KV heads {}", counts.len(), named(&counts)))
}

/// That only one of an engine's replicas is shown.
pub(crate) fn replicas(side: &str, dp: u32) -> Option<String> {
    (dp > 1).then(|| format!("{side}: replica 0 of {dp} is shown"))
}

fn named(numbers: &[usize]) -> String {
    let shown: Vec<String> = numbers.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    let left = numbers.len() - shown.len();
    let more = if left > 0 { format!(" and {left} more") } else { String::new() };
    shown.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_give_nothing_are_named() {
        let givers = |ranks: &[usize]| ranks.iter().copied().collect();
        assert_eq!(idle(2, &givers(&[0, 1])), None);
        let said = idle(4, &givers(&[0, 2])).unwrap();
        assert_eq!(said, "producer ranks 1, 3 hold copies and give nothing");
        let said = idle(2, &givers(&[1])).unwrap();
        assert_eq!(said, "producer rank 0 holds copies and gives nothing");
        let said = idle(20, &givers(&[0])).unwrap();
        assert!(said.contains("7, 8 and 11 more"), "{said}");
    }
}
