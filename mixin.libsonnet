// Monitoring mixin: alerts, recording rules and dashboards, for mixtool, Grizzly and kube-prometheus.
// `_config` sets the base addresses of the links in alerts, and the thresholds by the names of their series.
local alertFiles = [
  importstr 'deploy/prometheus/rules/alerts-energy.yml',
  importstr 'deploy/prometheus/rules/alerts-exporter.yml',
  importstr 'deploy/prometheus/rules/alerts-gpu.yml',
  importstr 'deploy/prometheus/rules/alerts-node.yml',
  importstr 'deploy/prometheus/rules/alerts-training.yml',
];
local ruleFiles = [
  importstr 'deploy/prometheus/rules/recording-energy.yml',
  importstr 'deploy/prometheus/rules/recording-fleet.yml',
  importstr 'deploy/prometheus/rules/recording-gpu.yml',
  importstr 'deploy/prometheus/rules/recording-node.yml',
  importstr 'deploy/prometheus/rules/recording-training.yml',
  importstr 'deploy/prometheus/rules/thresholds.yml',
];
local groups(files) = std.flattenArrays([std.parseYaml(file).groups for file in files]);
local configured(rule, config) =
  local name = std.get(rule, 'record', '');
  if name == 'site:links:info' then rule { labels: config.links }
  else if std.objectHas(config.thresholds, name) then rule { expr: 'vector(%g)' % config.thresholds[name] }
  else rule;

{
  _config+:: {
    links: {},  // grafana: address of Grafana; runbook: address of the runbook
    thresholds: {},
  },
  prometheusAlerts+:: { groups+: groups(alertFiles) },
  prometheusRules+:: {
    groups+: [
      group { rules: [configured(rule, $._config) for rule in group.rules] }
      for group in groups(ruleFiles)
    ],
  },
  grafanaDashboards+:: {
    'training-energy.json': import 'dashboards/json/training-energy.json',
    'training-fleet.json': import 'dashboards/json/training-fleet.json',
    'training-gpus.json': import 'dashboards/json/training-gpus.json',
    'training-node.json': import 'dashboards/json/training-node.json',
    'training-ranks.json': import 'dashboards/json/training-ranks.json',
    'training-run.json': import 'dashboards/json/training-run.json',
  },
}
